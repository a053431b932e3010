"""Teacher forcing: all blocks of a clip in one pass, with a clean stream as the past and a noisy one to denoise.

The model is `CausalWan`, unchanged. Its batch axis has *entries*: for every row of the batch its clean blocks, its
noisy blocks, and extra noisy first blocks of any clips, because the block that starts from nothing is the hardest.
`ClipContext`, which replaces the `BlockContext` of inference, decides what an entry attends to, in the same windows:

    block 0              [ own 0-2 ]
    sink                 [ sink 0 | bank 0 | prior 1-2 | own 3-5 ]
    no sink              [ prior 0-2 | own 3-5 ]
    cut                  [ sink 0 | bank 0 | own 3-5 ]
    long                 [ sink 0 | prior 1-m | own behind it ],  m up to LONG_PRIOR
    dense                [ all frames before, 0, 1, 2 ... | own behind them ]

Sink, prior and bank are keys of the clean stream. The model is trained without any bank, as the public models are, so
that a memory with a bank meets a model that never saw one. A mixture with banks exists for comparison: as in
`recap.memory`, the bank has the top tokens by frozen score of all frames before the block except the sink's, at
temporal phase 0 with their own row and column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recap.attention.rope import Rotation, rotate, rotation
from recap.backbones.wan.model import CausalWan, TextConditioning
from recap.backbones.wan.spec import NUM_TRAIN_STEPS, WanSpec
from recap.types import Role, Segment, frame_positions

LONG_PRIOR = 8
DENSE_FRAMES = 21
"""A whole clip: the number of phases of a dense window."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The windows of neighbouring rows of a batch, which share their shapes.

    `cut` means no prior at any block, `bank` is a number of tokens. In a `dense` window the sink is simply the first
    of all frames.
    """

    rows: int
    sink: bool = True
    cut: bool = False
    bank: int = 0
    long: bool = False
    dense: bool = False

    def __post_init__(self) -> None:
        assert self.sink or not (self.cut or self.bank or self.long or self.dense), "no sink: only the prior"
        assert not (self.long and self.dense), "a dense window is as long as there is past"
        assert not ((self.long or self.dense) and (self.cut or self.bank)), "long windows have a plain prior"


Shares = list[tuple[Layout, float]]


def spread_rows(batch: int, frame_tokens: int, *, bank_rows: bool = False) -> tuple[Layout, ...]:
    """Return the mixture of layouts of a batch; half of its rows have a bank only if `bank_rows`."""
    return _deal(batch, _bank_shares(frame_tokens) if bank_rows else _plain_shares())


def _plain_shares() -> Shares:
    """Return dense context, as for public models, and the windows of rollouts, all of whole frames.

    In dense rows an actor that leaves and returns within a clip must be looked up in the past. That is all that the
    model learns about remembering.
    """
    return [
        (Layout(0, dense=True), 0.40),
        (Layout(0), 0.27),
        (Layout(0, sink=False), 0.15),
        (Layout(0, cut=True), 0.10),
        (Layout(0, long=True), 0.08),
    ]


def _bank_shares(frame_tokens: int) -> Shares:
    """Return a mixture in which half of the rows have a bank, to measure what training with one adds."""
    return [
        (Layout(0, bank=frame_tokens), 0.29),
        (Layout(0, bank=frame_tokens // 4), 0.08),
        (Layout(0), 0.21),
        (Layout(0, sink=False), 0.125),
        (Layout(0, cut=True, bank=frame_tokens), 0.125),
        (Layout(0, cut=True), 0.085),
        (Layout(0, long=True), 0.085),
    ]


def _deal(batch: int, shares: Shares) -> tuple[Layout, ...]:
    counts = [int(share * batch) for _, share in shares]
    owed = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i][1] * batch)
    for index in owed[: batch - sum(counts)]:
        counts[index] += 1
    return tuple(replace(kind, rows=count) for count, (kind, _) in zip(counts, shares, strict=True) if count)


def bank_tokens(score: Tensor, num_blocks: int, block_tokens: int, sink_tokens: int, capacity: int) -> Tensor:
    """Return the tokens of the bank at each block after the first, B blocks-1 K indices into a clip's tokens.

    `score` B N is frozen, one per token of the clip; tokens of the sink are never offered.
    """
    token = torch.arange(score.shape[1], device=score.device)
    banks = []
    for block in range(1, num_blocks):
        offered = (token >= sink_tokens) & (token < block * block_tokens)
        banks.append(score.masked_fill(~offered, -torch.inf).topk(capacity, dim=1).indices)
    return torch.stack(banks, dim=1)


class Turns(NamedTuple):
    """The rotations of frames by temporal phase."""

    head_dim: int
    grid: tuple[int, int]
    table: Rotation  # 1 (phases S) 1 D/2

    def frames(self, first: int, count: int) -> Rotation:
        size = self.grid[0] * self.grid[1]
        window = slice(first * size, (first + count) * size)
        return Rotation(self.table.cos[:, window], self.table.sin[:, window])


def make_turns(spec: WanSpec, device: torch.device | str) -> Turns:
    phases = torch.arange(max(DENSE_FRAMES, 1 + LONG_PRIOR + spec.frames_per_block), device=device)
    return Turns(spec.head_dim, spec.grid, rotation(frame_positions(phases, spec.grid), spec.head_dim))


class ClipContext:
    """A `Context` for all entries of a batch; `layouts` lists its rows in order.

    `banks` has rows blocks-1 K indices per layout, or None.
    """

    def __init__(
        self,
        spec: WanSpec,
        layouts: tuple[Layout, ...],
        num_blocks: int,
        turns: Turns,
        banks: tuple[Tensor | None, ...],
    ) -> None:
        self._spec = spec
        self._layouts = layouts
        self._num_blocks = num_blocks
        self._turns = turns
        self._banks = banks
        self._frame = spec.grid[0] * spec.grid[1]
        self._per_block = spec.frames_per_block

    @property
    def phases(self) -> Tensor:
        """Return placeholder phases; `attend` gives each entry its own."""
        return torch.arange(self._per_block)

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Return placeholder positions, which are not used."""
        return frame_positions(self.phases.to(device), grid)

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        """Attend with the queries (B entries) N H D, row by row: clean blocks, noisy blocks, extra ones."""
        (current,) = own
        assert current.role is Role.CURRENT
        rows = sum(layout.rows for layout in self._layouts)
        # Under autocast the norms leave queries and keys in fp32 while values are in bf16.
        parts = (query, current.keys, current.values)
        q, k, v = (x.to(current.values.dtype).unflatten(0, (rows, -1)) for x in parts)
        blocks = self._num_blocks
        opening = self._alone(*(torch.cat([x[:, :1], x[:, blocks : blocks + 1], x[:, 2 * blocks :]], 1)
                                for x in (q, k, v)))  # fmt: skip
        if blocks == 1:
            return opening.flatten(0, 1)
        later, start = [], 0
        for layout, bank in zip(self._layouts, self._banks, strict=True):
            part = slice(start, start + layout.rows)
            start += layout.rows
            read = self._long if layout.long or layout.dense else self._short
            later.append(read(layout, bank, q[part], k[part], v[part]))
        rest = torch.cat(later)  # B 2 blocks-1 N H D
        output = torch.cat([opening[:, :1], rest[:, 0], opening[:, 1:2], rest[:, 1], opening[:, 2:]], dim=1)
        return output.flatten(0, 1)

    def _alone(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within block 0, which sees only its own tokens."""
        turn = self._turns.frames(0, self._per_block)
        return _read(rotate(q, turn), rotate(k, turn), v)

    def _short(self, layout: Layout, bank: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in windows of the usual length; return rows 2 blocks-1 N H D."""
        blocks, size = self._num_blocks, self._frame
        # After the first block, a block's own frames follow a full window.
        first_own = self._spec.window_frames - self._per_block
        prior = first_own - 1 if layout.sink else first_own
        clean = (k[:, : blocks - 1], v[:, : blocks - 1])
        kept_keys: list[Tensor] = []
        kept_values: list[Tensor] = []
        if layout.sink:
            first = rotate(k[:, :1, :size], self._turns.frames(0, 1))
            kept_keys.append(first.expand(-1, blocks - 1, -1, -1, -1))
            kept_values.append(v[:, :1, :size].expand(-1, blocks - 1, -1, -1, -1))
        if bank is not None:
            turned = rotate(clean[0], self._repeated(0))
            kept_keys.append(_pick(turned, bank))
            kept_values.append(_pick(clean[1], bank))
        if not layout.cut:
            since = (self._per_block - prior) * size
            kept_keys.append(rotate(clean[0][:, :, since:], self._turns.frames(first_own - prior, prior)))
            kept_values.append(clean[1][:, :, since:])
        turn = self._turns.frames(first_own, self._per_block)
        q, k, v = (self._streams(x) for x in (q, k, v))
        keys = torch.cat([*(_both(x) for x in kept_keys), rotate(k, turn)], dim=3)
        values = torch.cat([*(_both(x) for x in kept_values), v], dim=3)
        return _read(rotate(q, turn), keys, values)

    def _long(self, layout: Layout, bank: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in longer windows; each block has its own length, so they run one by one."""
        blocks, size, per = self._num_blocks, self._frame, self._per_block
        keys, values = k[:, :blocks].flatten(1, 2), v[:, :blocks].flatten(1, 2)
        sink = rotate(keys[:, :size], self._turns.frames(0, 1))
        outputs = []
        for block in range(1, blocks):
            prior = block * per - 1
            if layout.long:
                prior = min(prior, LONG_PRIOR)
            past = slice((block * per - prior) * size, block * per * size)
            turn = self._turns.frames(1 + prior, per)
            before = torch.cat([sink, rotate(keys[:, past], self._turns.frames(1, prior))], dim=1)
            past_values = torch.cat([values[:, :size], values[:, past]], dim=1)
            own = [torch.stack([x[:, block], x[:, blocks + block]], dim=1) for x in (q, k, v)]
            outputs.append(
                _read(
                    rotate(own[0], turn),
                    torch.cat([_both(before), rotate(own[1], turn)], dim=2),
                    torch.cat([_both(past_values), own[2]], dim=2),
                )
            )
        return torch.stack(outputs, dim=2)

    def _streams(self, x: Tensor) -> Tensor:
        """Select rows 2 blocks-1 from rows x entries: clean and noisy entries of all blocks after the first."""
        blocks = self._num_blocks
        return torch.stack([x[:, 1:blocks], x[:, blocks + 1 : 2 * blocks]], dim=1)

    def _repeated(self, phase: int) -> Rotation:
        """Return the rotation of all frames of a block at one temporal phase."""
        one = self._turns.frames(phase, 1)
        return Rotation(*(part.repeat(1, self._per_block, 1, 1) for part in one))


def _both(x: Tensor) -> Tensor:
    """Repeat for the clean and the noisy stream, along a second axis of two."""
    return x.unsqueeze(1).expand(-1, 2, *x.shape[1:])


def _pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Gather tokens rows blocks-1 K, counted through the clip, of x rows blocks-1 N H D -> rows blocks-1 K H D."""
    flat = x.flatten(1, 2)
    index = tokens.flatten(1, 2)[..., None, None].expand(-1, -1, *flat.shape[2:])
    return flat.gather(1, index).unflatten(1, tokens.shape[1:])


def _read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute plain attention of (...) N H D; the leading axes are one batch for the kernel."""
    lead = q.shape[:-3]
    q, k, v = (x.flatten(0, len(lead) - 1).transpose(1, 2) for x in (q, k, v))
    read: Tensor = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(0, lead)
    return read


class ClipBatch(NamedTuple):
    """The inputs of one pass; sigmas are noise levels 0..1 per block."""

    clean: Tensor  # B blocks F C rows columns: the past
    noisy: Tensor  # B blocks F C rows columns
    sigma: Tensor  # B blocks
    extra: Tensor  # B X F C rows columns: further noisy first blocks
    extra_sigma: Tensor  # B X
    text: Tensor  # B blocks L text_dim
    extra_text: Tensor  # B X L text_dim
    score: Tensor  # B N: frozen scores of all tokens of the clip, for the banks


def predict_flow(model: CausalWan, batch: ClipBatch, layouts: tuple[Layout, ...], turns: Turns) -> Tensor:
    """Predict the flow of all noisy entries, B blocks+X F C rows columns: noisy blocks, then the extra ones."""
    rows, blocks = batch.noisy.shape[:2]
    spec = model.spec
    frame, per = spec.grid[0] * spec.grid[1], spec.frames_per_block
    banks, start = [], 0
    for layout in layouts:
        score = batch.score[start : start + layout.rows]
        start += layout.rows
        banks.append(bank_tokens(score, blocks, frame * per, frame, layout.bank) if layout.bank else None)
    assert start == rows, "layouts must list every row of the batch"
    context = ClipContext(spec, layouts, blocks, turns, tuple(banks))
    latents = torch.cat([batch.clean, batch.noisy, batch.extra], dim=1)
    entries = latents.shape[1]
    sigma = torch.cat([torch.zeros_like(batch.sigma), batch.sigma, batch.extra_sigma], dim=1)
    times = (NUM_TRAIN_STEPS * sigma).flatten().unsqueeze(1).expand(-1, per)
    text = torch.cat([batch.text, batch.extra_text], dim=1)
    prompts = spread_text(model.condition(text.flatten(0, 1)), rows, blocks, entries)
    flow = model(latents.flatten(0, 1), times, prompts, context)
    return flow.unflatten(0, (rows, entries))[:, blocks:]


def spread_text(text: TextConditioning, rows: int, blocks: int, entries: int) -> TextConditioning:
    """Spread conditioning of rows x (blocks, extra) to rows x entries: blocks to both streams, extra ones once."""
    device = text.keys[0].device
    order = torch.arange(entries, device=device)
    order = torch.where(order < blocks, order, order - blocks)

    def spread(x: Tensor) -> Tensor:
        return x.unflatten(0, (rows, -1)).index_select(1, order).flatten(0, 1)

    return TextConditioning(tuple(map(spread, text.keys)), tuple(map(spread, text.values)))
