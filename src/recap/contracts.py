"""This module states every promise between rooms, on one page.

Novelty notices, memory keeps, attention reads, a backbone generates, the rollout conducts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from recap.errors import RecapError, refuse
from recap.types import BackboneSpec, Block, Candidates, Card, MemoryTrace, Segment, Tokens, state_copy

State = dict[str, Tensor]
"""Named tensors from which a stateful part can be restored exactly."""

LAST_FRAME = (1 << 23) - 1
"""The highest number of a frame: tokens are ordered by a whole number whose upper 23 bits are their frame's."""


def copy_of(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor that may not be there yet."""
    return None if tensor is None else tensor.clone()


def copies(tensors: Mapping[str, Tensor | None]) -> State:
    """Return the state of a part that keeps these tensors: copies of those that are there."""
    return {name: state_copy(tensor) for name, tensor in tensors.items() if tensor is not None}


class Entry(NamedTuple):
    """Says what one tensor of a state must be.

    A size may be a letter, which stands for the same size all over the state, or a range. A word as dtype likewise
    stands for one type of floats. Floats must be finite, and all values lie in low..high.
    """

    shape: tuple[int | str | range, ...]
    dtype: torch.dtype | str
    low: float | Sequence[int] = -math.inf
    high: float | Sequence[int] = math.inf


def together(state: State, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries that are kept all at once, or none of them where the state has none."""
    return dict(entries) if entries.keys() & state.keys() else {}


def check_state(state: State, expected: Mapping[str, Entry], field: str = "state") -> None:
    """Refuse a state that does not consist of exactly these entries, before anything of it is used."""
    remedy = "load what `state` returned, with the same settings, sizes and number of rows"
    for name in sorted(state.keys() ^ expected.keys()):
        if name in expected:
            raise refuse(f"{field} {name}", None, "it belongs to the others", remedy)
        raise refuse(field, name, f"it must consist of {', '.join(expected) or 'nothing'}", remedy)
    # What letters and words stand for.
    known: dict[str, Any] = {}
    for name, entry in expected.items():
        value, named = state[name], f"{field} {name}"
        if not isinstance(value, Tensor):
            raise refuse(named, value, "must be a tensor", remedy)
        dtype = entry.dtype
        if isinstance(dtype, str):
            dtype = known.setdefault(dtype, value.dtype if value.is_floating_point() else torch.float32)
        if value.dtype != dtype:
            raise refuse(named, value.dtype, f"must be {dtype}, as the others are", remedy)
        shape = tuple(value.shape)
        sides = [known.get(side, side) if isinstance(side, str) else side for side in entry.shape]
        if len(shape) != len(sides) or not all(map(_fits, shape, sides)):
            limit = f"must have the shape {' '.join(str(side) for side in sides) or '()'}"
            raise refuse(named, shape, limit, remedy)
        known |= {side: size for side, size in zip(entry.shape, shape, strict=True) if isinstance(side, str)}
        low, high = (torch.as_tensor(limit, device=value.device) for limit in (entry.low, entry.high))
        bad = value[~(torch.isfinite(value) & (value >= low) & (value <= high))]
        if bad.numel():
            limit = f"must be finite and lie in {entry.low}..{entry.high}"
            raise refuse(named, bad[0].item(), limit, remedy)


def _fits(size: int, side: int | str | range) -> bool:
    if isinstance(side, str):
        return size > 0
    return size in side if isinstance(side, range) else size == side


class Flow(NamedTuple):
    """Carries the flow of every consecutive pair, in pixels; channel 0 is x (columns), channel 1 is y (rows)."""

    forward: Tensor  # B T-1 2 Y X: from picture i to i + 1
    backward: Tensor  # B T-1 2 Y X: from picture i + 1 to i


class FlowEstimator(Protocol):
    """Estimates both directions of all consecutive pairs in one call, so that each picture is encoded once."""

    def __call__(self, pictures: Tensor) -> Flow:
        """Estimate the flow of pictures B T 3 Y X, 0..1, T >= 2."""


class Admission(ABC):
    """Decides what a bank is offered and what stays in it; see `recap.admission.base.ScoredAdmission`."""

    reads_keys: ClassVar[bool] = False
    """Whether `read_keys` must be called before `propose`, which then has to wait for the clean pass."""

    needs_pixels: ClassVar[bool] = True
    """Whether it matters what the pixels show; if not, only their shape and device count: none need be decoded."""

    takes_leaving: ClassVar[bool] = False
    """Whether tokens are offered when they leave the window (`score_leaving`) instead of when they are generated."""

    @abstractmethod
    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        """Score every token of a finished block, frame by frame, row-major; pixels B T 3 Y X, 0..1."""

    @abstractmethod
    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        """Return indices B min(capacity, pool) into the pool, which lists the bank first and newcomers after."""

    def look(self, block: Block, pixels: Tensor) -> None:
        """Do what a rule by keys needs the pixels for, during the clean pass; `propose` works without it too."""

    def read_keys(self, keys: Tensor) -> None:
        """Receive the keys L B N H D, unrotated, of the block that `propose` will be asked about."""

    def score_leaving(self, source: Tensor) -> Candidates:
        """Score the tokens, source B N 3, that leave the window with the finished block, oldest first."""
        raise NotImplementedError("an admission with takes_leaving = True implements score_leaving")

    def state(self) -> State:
        return {}

    def expected(self, state: State) -> dict[str, Entry]:
        """Return what such a state must consist of; a rule without state keeps nothing."""
        return {}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; refuses what is none of it."""
        check_state(state, self.expected(state))


@dataclass(frozen=True, slots=True)
class AdmissionConfig(ABC):
    """Is the base of an admission's settings: a frozen dataclass in the admission's own file."""

    keeps: ClassVar[str]
    needs: ClassVar[str]
    needs_flow: ClassVar[bool] = True
    """Whether `build` gets a working flow estimator; without need neither weights nor OpenCV have to be there."""

    @abstractmethod
    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> Admission: ...


class MemoryPolicy(ABC):
    """Remembers for one rollout. One object per rollout keeps all state, for all rows of the batch.

    Seven methods are required. `recap.memory.base.WindowMemory` has all of them: a subclass adds what it keeps.
    """

    needs_queries: ClassVar[bool] = False
    """Whether `observe` must be called before `arrange`; what a block sees is then unknown before its first step."""

    @abstractmethod
    def begin(self, block: Block) -> Tensor:
        """Return the temporal phases, F, of the block's own frames. From here to `commit` the memory is frozen."""

    @abstractmethod
    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        """Return all that the queries may see: what is kept, then `own`. What is kept is the same all block long.

        A backbone that carries its history passes all its segments as `own`, where some may be biased by `replace`.
        Others are asked once per block and layer, with no segments.
        """

    @abstractmethod
    def write(self, layer: int, tokens: Tokens) -> None:
        """Take what the layer made of the finished block; called in the clean pass only."""

    @abstractmethod
    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        """Choose what stays of the finished block, then slide the prior."""

    @abstractmethod
    def clear_prior(self) -> None:
        """Forget the prior at a shot boundary; sink and bank stay."""

    @abstractmethod
    def state(self) -> State:
        """Return everything that later blocks depend on, as copies."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Restore the state of an equal object; continuing is then bit-identical."""

    @property
    def needs_steps(self) -> bool:
        """Tell whether it depends on the denoising steps, so that latents are not enough to make it again."""
        return self.needs_queries

    @property
    def wants_tokens(self) -> bool:
        """Tell whether `write` keeps anything; if not, a backbone that needs no clean pass itself can skip it."""
        return True

    @property
    def sink_frames(self) -> int:
        """Return how many frames of the opening it keeps for good."""
        return 0

    @property
    def needs_pixels(self) -> bool:
        """Tell whether it matters what the pixels show; if not, they may be NaN, of the right shape."""
        return True

    def noise_block(self, block: Block) -> int:
        """Return the block whose first noise this one starts from; asked before `begin`. Later steps are fresh."""
        return block.index

    def observe(self, layer: int, query: Tensor) -> None:
        """Receive the first queries B N H D, unrotated, once per block and layer, before its first `arrange`."""

    def measure(self, layer: int, share: Tensor) -> None:
        """Receive, in the clean pass, the share B H of a segment with `measured`, as it would be without any bias."""

    def take_sink_share(self, share: Tensor) -> None:
        """Receive the sink's share of attention, B, in the block's denoising steps, if it was measured there."""

    def look(self, block: Block, pixels: Tensor) -> None:
        """Do what `commit` needs the pixels alone for, while the clean pass runs; `commit` works without it too."""

    def reread(self, block: Block) -> None:
        """Move an earlier block that is read again into the prior, and nothing else; called instead of `commit`."""
        limit = "it cannot read its prior again, which this script asks for"
        raise refuse("memory", type(self).__name__, limit, "give it a method reread, see recap.contracts")

    def reinforce(self, reinforcement: float | str) -> None:
        """Change lambda, or the schedule of it, from the next block on; see `recap.memory.reinforcement`."""
        limit = "it has no sink whose weight could be changed"
        raise refuse("memory", type(self).__name__, limit, "choose recap or sink")

    def pin(self, slots: Sequence[int], name: str) -> None:
        """Move these slots of the bank to slots of their own, under a name, from which nothing is evicted."""
        raise self._no_bank()

    def forget(self, slots: Sequence[int]) -> None:
        """Empty these slots of the bank, in every row."""
        raise self._no_bank()

    def replace_bank(self, other: MemoryPolicy) -> None:
        """Take the bank of a new memory of this kind, of another size, and fill it from the present one."""
        raise self._no_bank()

    def take_cast(self, name: str, keys: Tensor, values: Tensor, entries: Candidates) -> None:
        """Pin tokens of another video under a name: keys and values L B N H D, unrotated."""
        raise self._no_bank()

    def drop_cast(self, name: str) -> None:
        """Forget all that is pinned under a name."""
        raise self._no_bank()

    def _no_bank(self) -> RecapError:
        limit = "it has no bank next to which tokens could be pinned"
        return refuse("memory", type(self).__name__, limit, "choose recap")

    def refresh(self, first_frame: int, keys: Tensor, values: Tensor) -> None:
        """Replace the recent past by the frames from `first_frame` to the newest, recomputed, L B N H D, unrotated.

        Called between two blocks by a backbone that recomputes its past for a new prompt. A bank stays as it is.
        """
        limit = "it cannot take keys recomputed for a new prompt"
        raise refuse("memory", type(self).__name__, limit, "give it a method refresh, see recap.contracts")


@dataclass(frozen=True, slots=True)
class MemoryConfig(ABC):
    """Is the base of a memory's settings: a frozen dataclass in the memory's own file."""

    card: ClassVar[Card]
    """Required of a memory in the registry; `recap list memories` prints it."""

    keeps_bank: ClassVar[bool] = False
    """Whether the memory asks for an admission rule."""
    usual_admission: ClassVar[str] = "flow"
    """The name of the rule that fills its bank unless another is chosen."""

    @abstractmethod
    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> MemoryPolicy:
        """Make a fresh memory; `admission` makes the run's admission rule and is called only if one is wanted."""

    def attended_frames(self, spec: BackboneSpec) -> Sequence[float]:
        """Return how many frames' worth of tokens a full memory shows; several values where they alternate."""
        return (spec.window_frames,)


class Context(Protocol):
    """Lets a backbone read what one block may attend to; own kernels and history need all of a `BlockContext`."""

    @property
    def phases(self) -> Tensor:
        """Return the temporal phases, F, of the block's own frames."""

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Return positions 1 N 3 of the block's own tokens on that grid: the same tensor all block long."""

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        """Compute self-attention of queries B N H D, at the CURRENT segment's positions, over memory and `own`."""


Noise = Callable[[], Tensor]
"""Returns fresh unit Gaussian noise, B F C rows columns, for the current block at each call."""


class Decoder(Protocol):
    """Decodes a stream of consecutive blocks of latents to pixels."""

    def decode(self, latents: Tensor) -> Tensor:
        """Decode B F C rows columns to B T 3 Y X in 0..1; the first frame of the stream is one picture."""

    def state(self) -> State:
        """Return everything that later blocks depend on; nothing, if the stream has seen nothing."""

    def load_state(self, state: State) -> None:
        """Restore the state of an equal stream; continuing is then bit-identical."""


class Backbone(Protocol):
    """Generates latents, as a causal video model. One model serves many rollouts, one call at a time.

    No call's result depends on the calls before it, so rollouts may take turns, also between a block's `denoise` and
    its `settle`. Calls must not overlap, as in two threads: storage and hooks are shared.
    """

    @property
    def spec(self) -> BackboneSpec: ...

    def condition(self, prompts: tuple[str, ...]) -> Any:
        """Return the backbone's own encoding of one prompt per row; opaque to everyone else."""

    def denoise(self, noise: Noise, conditioning: Any, context: Context) -> Tensor:
        """Generate one block: B F C rows columns."""

    def settle(self, latents: Tensor, conditioning: Any, context: Context) -> None:
        """Run the clean pass: one forward at the clean time, in which the context hands tokens to the memory."""

    def decoder(self) -> Decoder:
        """Open a new decoding stream."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pictures B T 3 Y X in 0..1, T = 1 + n pictures_per_frame, as latents B 1+n C rows columns."""


class BackboneConfig(Protocol):
    """Is a frozen dataclass that says what a backbone is loaded from and how it is set up."""

    def build(
        self, *, device: str, dtype: torch.dtype, prompts: Sequence[str], notice: Callable[[str], None]
    ) -> Backbone:
        """Make a backbone ready to use; `prompts` are all that will come, so a text encoder can be freed early."""


class Sample(NamedTuple):
    """Shows a moment of a finished video, and what the script asked for there."""

    second: float
    prompt: str
    picture: Tensor  # Y X 3, uint8


class Curve(NamedTuple):
    """Rates one subject: 0..1 per sample, None where there is nothing to say."""

    subject: str
    values: Sequence[float | None]


class Judge(Protocol):
    """Says how well a video keeps what it showed at first; `name` and `about` tell the reader what is measured."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    def curves(self, samples: Iterable[Sample]) -> list[Curve]:
        """Return a curve per subject, the same for all videos of a script; reads the samples in order, to the end."""

    def subjects(self, picture: Tensor) -> Tensor | None:
        """Tell where subjects are in a picture Y X 3, uint8, by token of the grid; None if it cannot tell."""


Aside = Callable[[Callable[[], None]], Callable[[], None]]
"""Starts background work; returns a function that waits for it."""
