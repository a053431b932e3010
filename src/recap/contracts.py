"""Every promise between rooms, on one page.

novelty notices, memory keeps, attention reads, a backbone draws, the rollout conducts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from recap.types import (
    BackboneSpec,
    Block,
    Candidates,
    GeneratedBlock,
    MemoryTrace,
    Past,
    Role,
    Segment,
    Tokens,
)

State = dict[str, Tensor]
"""Named tensors from which a stateful part can be put back exactly."""


class Stateful(Protocol):
    def state(self) -> State:
        """All that later blocks depend on. An object that has seen nothing may return an empty dict."""

    def load_state(self, state: State) -> None:
        """Take the state of an equal object back; continuing then is bit-identical."""


class Flow(NamedTuple):
    """Optical flow of every consecutive pair, in pixels; channel 0 is x (columns), channel 1 is y (rows)."""

    forward: Tensor  # B T-1 2 Y X: from picture i to i + 1
    backward: Tensor  # B T-1 2 Y X: from picture i + 1 to i


class FlowEstimator(Protocol):
    """Both directions of all consecutive pairs in one call, so that each picture is encoded once."""

    def __call__(self, pictures: Tensor) -> Flow:
        """Pictures B T 3 Y X, 0..1, T >= 2."""


class Admission(Stateful, Protocol):
    """Decides what a bank is offered and what stays in it."""

    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        """Score every token of a finished block, frame by frame, row-major; pixels B T 3 Y X, 0..1."""

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        """Indices B min(capacity, pool) into the pool, which lists the bank first and newcomers after."""


@runtime_checkable
class ReadsKeys(Protocol):
    """An admission that also looks at what the backbone made of a block; a memory that knows it hands it over."""

    def read_keys(self, keys: Tensor) -> None:
        """Before `propose`: keys L B N H D of the finished block's tokens, unrotated."""


@runtime_checkable
class TakesLeaving(Protocol):
    """An admission that is offered tokens as they leave the window instead of as they are drawn."""

    def score_leaving(self, source: Tensor) -> Candidates:
        """Score the tokens, source B N 3, that leave the window with the finished block, oldest first."""


class MemoryPolicy(Stateful, Protocol):
    """What a rollout remembers. One object per rollout; it holds all state, for all rows of the batch."""

    def begin(self, block: Block) -> Tensor:
        """Temporal phases, F, of the block's own frames. From here to `commit` the memory is frozen."""

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        """Everything the queries may see: what is kept, then `own`. What is kept does not change within a block.

        A backbone that carries its history passes all its segments as `own`, where some may be biased by `replace`.
        Others are asked once per block and layer, with no segments.
        """

    def write(self, layer: int, tokens: Tokens) -> None:
        """Clean pass only: take what the layer made of the finished block."""

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        """Propose, admit, then slide the prior."""

    def clear_prior(self) -> None:
        """Shot boundary: forget the prior, keep sink and bank."""


@runtime_checkable
class Refreshable(Protocol):
    """A memory that can follow a backbone which recomputes its past when the prompt changes midway."""

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        """Between two blocks: the frames from `first_frame` to the last one drawn, anew, L B N H D, unrotated.

        What is held of them as recent past is replaced; what is held for other reasons, as a bank is, stays.
        """


@runtime_checkable
class Rereadable(Protocol):
    """A policy whose prior can be made anew under another prompt; only scripts that ask for it need one."""

    def reread(self, block: Block) -> None:
        """Instead of `commit`, of an earlier block read again: prior, but nothing new."""


@runtime_checkable
class Foresighted(Protocol):
    """A memory part of whose `commit` needs the pixels alone, and can be done beside the clean pass."""

    def look(self, block: Block, pixels: Tensor) -> None:
        """Between `begin` and `commit`, which then finds that part done; it gives the same without."""


@runtime_checkable
class QueryAware(Protocol):
    """A memory that chooses by what the block at hand asks for."""

    def observe(self, layer: int, query: Tensor) -> None:
        """Once per block and layer, before its first `arrange`: the first pass's queries B N H D, unrotated."""


@runtime_checkable
class Selective(Protocol):
    """A memory that may have no use for the clean pass, which a backbone that needs none itself then leaves out."""

    @property
    def wants_tokens(self) -> bool:
        """Whether `write` keeps anything of what it is given."""


@runtime_checkable
class NoiseAware(Protocol):
    """A memory that comes with a rule for the noise a block starts from; that of later steps is always fresh."""

    def noise_block(self, block: Block) -> int:
        """Before `begin`: the index of the block whose first noise this one starts from; commonly its own."""


class Context(Protocol):
    """What one block may attend to, as a backbone sees it."""

    @property
    def phases(self) -> Tensor:
        """Temporal phases, F, of the block's own frames."""

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Positions 1 N 3 of the block's own tokens on that grid: the same tensor all block long."""

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        """Self-attention of queries B N H D (at the positions of the CURRENT segment) over memory and `own`."""


@runtime_checkable
class OpenContext(Context, Protocol):
    """A context whose memory can be read whole, before the first step, by kernels that want fixed storage."""

    @property
    def block_key(self) -> object:
        """Stands for this block of this rollout: the same object in its denoising steps and its clean pass."""

    @property
    def foreseeable(self) -> bool:
        """Whether `kept` can be asked before the first step; else only `attend` serves."""

    def kept(self, layer: int) -> list[Segment]:
        """What the memory adds to the layer's own tokens; it does not change within a block."""

    def hand_over(self, layer: int, tokens: Tokens) -> None:
        """Of a finished block: what the layer made of it, for the memory."""

    def measured(self, shares: dict[Role, Tensor], stage: int | None = None) -> None:
        """Shares of attention mass, B per role; what is not measured is left out. A pyramid names its stage."""


@runtime_checkable
class CarryingContext(OpenContext, Protocol):
    """What a backbone needs that carries its history in its own sequence, instead of keys and values kept for it."""

    @property
    def past(self) -> Past:
        """What was drawn before this block."""

    @property
    def wants_tokens(self) -> bool:
        """Whether the memory has a use for a clean pass."""

    def arranged(self, layer: int, own: list[Segment]) -> list[Segment]:
        """What the memory makes of the sequence's own segments: it may bias them and add others."""


Noise = Callable[[], Tensor]
"""Each call draws fresh unit Gaussian noise, B F C rows columns, for the block at hand."""


NoiseSource = Callable[[Block, int], Tensor]
"""Noise from outside: (block, draw) -> B F C rows columns, floats of any dtype and device.

Draw 0 starts the block, draw n is asked for before its n-th later step (Helios: at its n-th later stage). The
answer must depend on these two alone: a resumed rollout asks from the middle, and a block may be asked for twice.
"""


class Decoder(Stateful, Protocol):
    """A decoding stream: consecutive blocks of latents in, pixels out."""

    def decode(self, latents: Tensor) -> Tensor:
        """B F C rows columns -> B T 3 Y X in 0..1; the first frame of the stream is one picture."""


class Backbone(Protocol):
    """A causal video model. One model serves many rollouts, one call at a time.

    No call's result depends on the calls before it, so rollouts may take turns block by block, or even between a
    block's `denoise` and its `settle`. Calls must not overlap, as in two threads: storage and hooks are shared.
    """

    @property
    def spec(self) -> BackboneSpec: ...

    def condition(self, prompts: tuple[str, ...]) -> Any:
        """Whatever the backbone makes of one prompt per row; opaque to everyone else."""

    def denoise(self, noise: Noise, conditioning: Any, context: Context) -> Tensor:
        """Generate one block: B F C rows columns."""

    def settle(self, latents: Tensor, conditioning: Any, context: Context) -> None:
        """The clean pass: one forward at the clean time, in which the context hands tokens to the memory."""

    def decoder(self) -> Decoder:
        """A fresh decoding stream."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures B T 3 Y X in 0..1, T = 1 + n pictures_per_frame -> latents B 1+n C rows columns."""


class Sample(NamedTuple):
    """A moment of a finished video, and what the script asked for there."""

    second: float
    prompt: str
    picture: Tensor  # Y X 3, uint8


class Curve(NamedTuple):
    """What a judge says of one subject: 0..1 per sample, None where there is nothing to say."""

    subject: str
    values: Sequence[float | None]


class Judge(Protocol):
    """Says how well a video keeps what it showed at first; `name` and `about` tell the reader what is measured."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    def curves(self, samples: Iterable[Sample]) -> list[Curve]:
        """A curve per subject, the same for all videos of a script; reads the samples, in order, to the end."""

    def subjects(self, picture: Tensor) -> Tensor | None:
        """Where subjects are in a picture Y X 3, uint8: bool, rows columns of tokens; None if it cannot tell."""


Recorder = Callable[[GeneratedBlock], None]

Aside = Callable[[Callable[[], None]], Callable[[], None]]
"""Starts work that nothing else waits for yet; the call it returns waits for it."""
