"""Knows all upstream names: which code base a pipeline is of, where its parts are, and its own arithmetic.

Self-Forcing         keys are cached rotated, at absolute time; attention returns a tensor
Infinite-Forcing     keys are cached raw and rotated when read, at window-relative time
LongLive 1.0         as Self-Forcing; attention also returns what is to be cached, later, by the model
LongLive 1.0, infinity variant: as LongLive, keys as in Infinite-Forcing
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recap.attention.attend import Attended, Readable, attend
from recap.attention.context import ContextKernels
from recap.attention.rope import bands, rotation
from recap.errors import refuse
from recap.types import Role

PARTS = ("q", "k", "v", "o", "norm_q", "norm_k", "num_heads", "head_dim", "local_attn_size", "sink_size")
RELEASED_ROLES = {Role.SINK, Role.PRIOR, Role.CURRENT}


@dataclass(frozen=True, slots=True)
class Checkout:
    """Names the parts of an upstream pipeline that are read or patched."""

    name: str
    # The wrapper that the pipeline calls; its `forward` sees latents, time and cache.
    generator: Any
    # The transformer itself, out of any LoRA wrapping, with the rotary table `freqs`.
    model: Any
    # One self-attention module per layer, and its fused kernel, B N H D each.
    attentions: tuple[Any, ...]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    vae: Any
    frame_tokens: int
    frames_per_block: int
    sink_frames: int
    # Whether its cache drops old frames; else it keeps a whole video.
    rolls: bool
    # The time of the clean pass.
    context_noise: float
    # Whether keys are cached rotated, at absolute time.
    bakes_phases: bool
    # Whether attention returns what is to be cached, and the model writes it.
    defers_writes: bool


class CheckoutKernels(ContextKernels):
    """Computes as the checkout does, under our contexts, so that a memory that changes nothing changes no bit.

    Rotation: upstream multiplies complex numbers of fp64 by the rows of a table; so does this, by the same rows.
    Phases the table does not have (fractions, or beyond its end) are computed, so a video may last longer than
    upstream's can.
    Attention: upstream's kernel neither takes a bias nor returns how the mass was shared out. It reads the layouts
    that a checkout has itself, sink, prior and current without a bias. All others go through our merge of one
    kernel per role, which equals it to rounding.
    """

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout

    def table(self, positions: Tensor, like: Tensor) -> Tensor:
        """Return one complex number per pair of channels, B N 1 D/2."""
        listed: Tensor = self._checkout.model.freqs.to(like.device)
        positions, widths = positions.to(like.device), bands(like.shape[-1])
        index = positions.long().clamp(0, listed.shape[0] - 1)
        parts = enumerate(listed.split(widths, dim=1))
        known = torch.cat([part[index[..., axis]] for axis, part in parts], dim=-1)
        exact = (index == positions).unsqueeze(-1)
        exact = torch.cat([exact[:, :, axis].expand(-1, -1, n) for axis, n in enumerate(widths)], dim=-1)
        computed = torch.complex(*rotation(positions, like.shape[-1], torch.float64))
        return torch.where(exact.unsqueeze(2), known.unsqueeze(2), computed)

    def turn(self, x: Tensor, table: Tensor) -> Tensor:
        """Rotate queries or keys B N H D."""
        pairs = torch.view_as_complex(x.to(torch.float64).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        """Attend; shares are measured where there is only one role, or a merge."""
        filled = [segment for segment in segments if segment.keys.shape[1]]
        if any(_needs_merge(segment) for segment in filled):
            return attend(query, filled)
        keys = torch.cat([segment.keys for segment in filled], dim=1)
        values = torch.cat([segment.values for segment in filled], dim=1)
        role = filled[0].role if len(filled) == 1 else None
        alone = {} if role is None else {role: query.new_ones(query.shape[0])}
        return Attended(self._checkout.attention(query, keys, values), alone)


def _needs_merge(segment: Readable) -> bool:
    """Tell whether upstream's kernel cannot read a segment, or not tell its share."""
    biased = bool(segment.log_bias) or segment.head_bias is not None
    return biased or segment.measured or segment.role not in RELEASED_ROLES


def find_checkout(pipeline: Any) -> Checkout:
    """Return the parts of a pipeline; the refusal names what cannot be found."""
    generator = _uncompiled(_need(pipeline, "pipeline", "generator"))
    vae = _need(pipeline, "pipeline", "vae")
    for part in ("decode_to_pixel", "model"):
        _need(vae, "pipeline.vae", part)
    model = _unwrapped(_need(generator, "pipeline.generator", "model"))
    _need(model, "the transformer", "freqs")
    attentions = tuple(
        _uncompiled(_need(block, f"blocks[{layer}]", "self_attn")) for layer, block in enumerate(model.blocks)
    )
    if not attentions:
        raise refuse("blocks", [], "the transformer has no layers", "load the model before attaching")
    first = attentions[0]
    kind = type(first)
    if "wan_5b" in kind.__module__.split("."):
        limit = "LongLive 2.0 pins chunks and may quantise its cache, which this does not follow"
        remedy = "attach to Self-Forcing, Infinite-Forcing or LongLive 1.0"
        raise refuse("pipeline", kind.__module__, limit, remedy)
    for part in PARTS:
        _need(first, f"{kind.__module__}.{kind.__qualname__}", part)
    namespace = vars(sys.modules[kind.__module__])
    if "attention" not in namespace:
        raise _missing(kind.__module__, "attention")
    name, bakes, defers = _recognise(kind, namespace)
    args = _need(pipeline, "pipeline", "args")
    return Checkout(
        name=name,
        generator=generator,
        model=model,
        attentions=attentions,
        attention=namespace["attention"],
        vae=vae,
        frame_tokens=int(_need(pipeline, "pipeline", "frame_seq_length")),
        frames_per_block=int(_need(pipeline, "pipeline", "num_frame_per_block")),
        sink_frames=int(first.sink_size),
        rolls=int(first.local_attn_size) != -1,
        context_noise=float(_need(args, "pipeline.args", "context_noise")),
        bakes_phases=bakes,
        defers_writes=defers,
    )


def check_forward(
    forward: Callable[..., Any], names: tuple[str, ...], where: str, kind: str, remedy: str
) -> inspect.Signature:
    """Refuse a `forward` that does not take these arguments; returns its signature."""
    signature = inspect.signature(forward)
    for name in names:
        if name not in signature.parameters:
            limit = f"its forward takes no {name!r}, as in all code bases known here"
            raise refuse(where, kind, limit, remedy)
    return signature


def _recognise(kind: type[Any], namespace: dict[str, Any]) -> tuple[str, bool, bool]:
    """Return the name, whether keys are cached rotated, and whether writes are deferred."""
    title, remedy = f"{kind.__module__}.{kind.__qualname__}", "check the checkout's version"
    signature = check_forward(kind.forward, ("kv_cache", "current_start"), "attention", title, remedy)
    if "sink_recache_after_switch" in signature.parameters:
        infinite = "block_relativistic_rope" in namespace
        return ("longlive-1.0-infinity" if infinite else "longlive-1.0"), not infinite, True
    if "random" in namespace and "copy" in namespace:
        return "infinite-forcing", False, False
    return "self-forcing", True, False


def _unwrapped(model: Any) -> Any:
    """Return the transformer inside LoRA wrapping, where `blocks` is reached through base_model.model."""
    model = _uncompiled(model)
    if "blocks" not in _names(model) and hasattr(model, "base_model"):
        model = _need(_need(model, "generator.model", "base_model"), "generator.model.base_model", "model")
    _need(model, "generator.model (also inside base_model.model)", "blocks")
    return _uncompiled(model)


def _uncompiled(module: Any) -> Any:
    """Return what `torch.compile(module)` wrapped: only there does `forward` have upstream's signature."""
    return vars(module).get("_modules", {}).get("_orig_mod", module)


def _names(module: Any) -> set[str]:
    """Return the attributes that an object has of its own: LoRA wrappers answer for those of what they wrap."""
    return {*vars(module), *vars(module).get("_modules", ())}


def _need(owner: Any, path: str, name: str) -> Any:
    """Return an attribute of upstream's; the refusal names the path where it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _missing(path, name, type(owner).__qualname__) from error


def _missing(path: str, name: str, kind: str = "module") -> ValueError:
    limit = f"no attribute {name!r} was found on {path} ({kind})"
    remedy = "pass the inference pipeline of Self-Forcing, Infinite-Forcing or LongLive 1.0, models loaded"
    return refuse("pipeline", kind, limit, remedy)
