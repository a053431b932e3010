"""The checkout's own arithmetic under our contexts, so that what is attached and changes nothing changes no bit.

Rotation: upstream multiplies complex numbers of fp64 by the rows of a table; so does this, by the same rows. Phases
the table does not have (fractions, or beyond its end) are computed, so a video may last longer than upstream's can.
Attention: one call of upstream's kernel where the layout is one that a checkout has itself, sink, prior and current
without a bias. That kernel neither takes a bias nor returns how the mass was shared out, so every other layout goes
through our merge of one kernel per role, which equals it to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recap.attach.checkout import Checkout
from recap.attention.attend import Attended, Readable, attend
from recap.attention.context import ContextKernels
from recap.attention.rope import bands, rotation
from recap.types import Role

RELEASED_ROLES = {Role.SINK, Role.PRIOR, Role.CURRENT}


class CheckoutKernels(ContextKernels):
    def __init__(self, checkout: Checkout):
        self._checkout = checkout

    def table(self, positions: Tensor, like: Tensor) -> Tensor:
        """One complex number per pair of channels, B N 1 D/2."""
        rows: Tensor = self._checkout.model.freqs.to(like.device)
        positions = positions.to(like.device)
        index = positions.long().clamp(0, rows.shape[0] - 1)
        widths = bands(like.shape[-1])
        at = torch.cat(
            [part[index[..., axis]] for axis, part in enumerate(rows.split(widths, dim=1))], dim=-1
        )
        listed = torch.cat(
            [
                (index == positions)[..., axis, None].expand(*index.shape[:2], n)
                for axis, n in enumerate(widths)
            ],
            dim=-1,
        )
        computed = torch.complex(*rotation(positions, like.shape[-1], torch.float64))
        return torch.where(listed.unsqueeze(2), at.unsqueeze(2), computed)

    def turn(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.to(torch.float64).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        filled = [segment for segment in segments if segment.keys.shape[1]]
        if any(segment.log_bias or segment.role not in RELEASED_ROLES for segment in filled):
            return attend(query, filled)
        keys = torch.cat([segment.keys for segment in filled], dim=1)
        values = torch.cat([segment.values for segment in filled], dim=1)
        role = filled[0].role if len(filled) == 1 else None
        alone = {} if role is None else {role: query.new_ones(query.shape[0])}
        return Attended(self._checkout.attention(query, keys, values), alone)
