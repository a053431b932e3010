"""This module defines the plain data that travels between the rooms.

Shape letters used all over the package:
    B rows of a batch     N tokens            H heads           D channels of a head
    F frames of a block   C latent channels   T pictures        Y, X rows and columns of pixels
A *frame* is a latent frame, a *picture* one decoded image, a *token* one patch of one frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from recap.io.older import StrEnum


class Role(StrEnum):
    """Says why a segment of keys is in the window."""

    SINK = "sink"
    BANK = "bank"
    CAST = "cast"
    SUMMARY = "summary"
    PRIOR = "prior"
    CURRENT = "current"


NO_TOKEN = -1e4
"""A token bias that leaves nothing of a token: finite, so that a segment of nothing else has a mass, of zero."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Says in which passes over a block something holds: `step in passes`, where None is the clean pass."""

    steps: tuple[bool, ...]  # by denoising step; the last entry stands for all later ones too
    clean: bool

    def __contains__(self, step: int | None) -> bool:
        return self.clean if step is None else self.steps[min(step, len(self.steps) - 1)]


@dataclass(frozen=True, slots=True)
class Segment:
    """Carries keys and values that a query may attend to: the one thing attention understands."""

    role: Role
    keys: Tensor  # B N H D, never rotated in storage
    values: Tensor  # B N H D
    positions: Tensor  # B N 3, or 1 N 3 for all rows: (t, h, w) phases to rotate the keys by when read
    log_bias: float = 0.0  # ln(lambda) for a reinforced sink
    # B N, fp32, added to the logits of each token; NO_TOKEN where a slot is empty.
    token_bias: Tensor | None = None
    # Which part of a sequence with history this is, set by the backbone; None for what a memory adds.
    part: int | None = None
    # B H, fp32, added to the logits of all tokens in each head, next to log_bias.
    head_bias: Tensor | None = None
    # Where log_bias and head_bias act; None stands for everywhere.
    bias_passes: Passes | None = None
    # Whether the memory wants its share of attention measured apart from the others', biased or not.
    measured: bool = False

    @property
    def biased(self) -> bool:
        """Tell whether anything is added to all of its logits."""
        return bool(self.log_bias) or self.head_bias is not None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Carries what one layer computed for a finished block in the clean pass; nothing in it is rotated."""

    queries: Tensor  # B N H D
    keys: Tensor  # B N H D
    values: Tensor  # B N H D
    positions: Tensor  # 1 N 3


@dataclass(frozen=True, slots=True)
class BackboneSpec:
    """Lists every size of a backbone. A size literal anywhere else is a bug."""

    name: str
    layers: int
    heads: int
    head_dim: int
    grid: tuple[int, int]  # tokens per frame: rows, columns
    token_pixels: int  # side of one token's square of pixels
    latent_channels: int
    latent_size: tuple[int, int]  # rows, columns of one latent frame
    frames_per_block: int
    window_frames: int  # sink + prior + current
    pictures_per_frame: int  # of every frame but the first, which is one picture
    pictures_per_second: int
    phases: Literal["window", "absolute"] = "window"
    carries_history: bool = False  # sink and prior are in the model's own sequence, read again every step
    decodes_alone: bool = False  # a block's pictures depend on it only; its first frame is one picture
    num_steps: int = 0  # denoising steps of a block; 0 where the memory cannot know or count them

    @property
    def frame_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def block_tokens(self) -> int:
        return self.frame_tokens * self.frames_per_block

    @property
    def picture_size(self) -> tuple[int, int]:
        return self.grid[0] * self.token_pixels, self.grid[1] * self.token_pixels

    @property
    def block_pictures(self) -> int:
        """Return the number of pictures of every block but the first, whose first frame may be a single one."""
        return self.num_pictures(2 * self.frames_per_block) - self.num_pictures(self.frames_per_block)

    @property
    def block_s(self) -> float:
        """Return the seconds of video that every block but the first has."""
        return self.block_pictures / self.pictures_per_second

    def num_pictures(self, frames: int) -> int:
        """Return the number of pictures that the first `frames` frames of a video decode to."""
        streams, rest = divmod(frames, self.frames_per_block) if self.decodes_alone else (0, frames)
        whole = streams * (1 + (self.frames_per_block - 1) * self.pictures_per_frame)
        return whole if rest == 0 else whole + 1 + (rest - 1) * self.pictures_per_frame

    def num_frames(self, pictures: int) -> int:
        """Return how many frames lie whole in the first `pictures` pictures of a video; undoes `num_pictures`."""
        block = self.num_pictures(self.frames_per_block)
        streams, rest = divmod(pictures, block) if self.decodes_alone else (0, pictures)
        whole = streams * self.frames_per_block
        return whole if rest == 0 else whole + 1 + (rest - 1) // self.pictures_per_frame

    def first_pictures(self, first_frame: int, num_frames: int) -> tuple[int, ...]:
        """Return the index in the video of the first picture of each of these frames."""
        return tuple(self.num_pictures(frame) for frame in range(first_frame, first_frame + num_frames))


@dataclass(frozen=True, slots=True)
class Block:
    """Describes one block of a plan: its frames, its prompts, and what happens to the prior first."""

    index: int
    first_frame: int
    num_frames: int
    prompts: tuple[str, ...]  # one per row
    clears_prior: bool = False
    rereads_prior: bool = False  # the prior is made again under this block's prompts
    # The pinned subjects that its prompts name; None shows all of them.
    subjects: tuple[str, ...] | None = None

    @property
    def end_frame(self) -> int:
        return self.first_frame + self.num_frames


NO_FLOAT64 = {"mps"}
"""Apple's GPUs have no fp64: what is computed in it elsewhere is computed in fp32 there."""


def widest(device: torch.device | str) -> torch.dtype:
    """Return the widest float of a device."""
    return torch.float32 if torch.device(device).type in NO_FLOAT64 else torch.float64


def frame_positions(phases: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return positions 1 N 3 of whole frames at the given temporal phases, row-major as the tokens are."""
    rows, columns = grid
    wide = widest(phases.device)
    sides = (torch.arange(side, dtype=wide, device=phases.device) for side in (rows, columns))
    axes = torch.meshgrid(phases.to(wide), *sides, indexing="ij")
    return torch.stack(axes, dim=-1).reshape(1, -1, 3)


def sort_key(source: Tensor) -> Tensor:
    """Return one whole number B N per token of source B N 3: it orders by age and then row-major."""
    frame, row, column = source.unbind(-1)
    return (frame << 40) + (row << 20) + column


def seeded(seed: int, index: int) -> torch.Generator:
    """Return a generator for (seed, index) on the CPU, so that every device gets the same numbers.

    Neighbouring seeds and indices give unrelated streams.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True, slots=True)
class Past:
    """Carries latents generated before a block, for a backbone that reads them again; B F C rows columns each."""

    opening: Tensor | None = None  # the video's first frame
    recent: Tensor | None = None  # the newest frames since the last cut, as many as the window reaches


@dataclass(frozen=True, slots=True)
class Candidates:
    """Lists tokens offered to the bank, or in it, with their frozen scores."""

    source: Tensor  # B N 3, int64: (frame, row, column) the token came from
    score: Tensor  # B N, float32

    @property
    def count(self) -> int:
        return self.score.shape[1]

    def at(self, index: Tensor) -> Candidates:
        """Return the entries at indices B K."""
        return Candidates(
            self.source.gather(1, index[..., None].expand(-1, -1, 3)), self.score.gather(1, index)
        )

    def part(self, columns: slice | Tensor) -> Candidates:
        """Return the same columns of every row."""
        return Candidates(self.source[:, columns], self.score[:, columns])

    def to(self, device: torch.device | str) -> Candidates:
        """Return the entries on a device."""
        return Candidates(self.source.to(device), self.score.to(device))

    @staticmethod
    def join(parts: Sequence[Candidates]) -> Candidates:
        """Return the entries of all parts, in order."""
        source, score = [part.source for part in parts], [part.score for part in parts]
        return Candidates(torch.cat(source, dim=1), torch.cat(score, dim=1))


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Records what a policy did with one block. Tensors stay on their device until they are written to a file."""

    tokens: dict[Role, int]  # keys every query of the block could see, by role
    admitted: Candidates | None = None  # source and score of what entered the bank; score -1 marks no entry
    evicted: Candidates | None = None  # likewise of what left it
    fired: Tensor | None = None  # B F: tokens with a positive score, per frame of the block
    offered: Candidates | None = None  # whole frames: all that the bank could choose from, taken or not
    edge_share: Tensor | None = None  # B: share of the bank's new tokens at the left or right border
    # Anything else worth a line of the trace.
    notes: dict[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Card:
    """Tells a reader what to know about a memory before choosing it by name; see `recap list memories`."""

    keeps: str
    extra_memory: str  # beyond the keys and values it attends to
    paper: str
    licence: str  # of the method's public code, none of which is used here
    training_free: bool = True


@dataclass(frozen=True, slots=True)
class GeneratedBlock:
    """Carries a finished block and its pictures: what the rollout yields."""

    block: Block
    latents: Tensor  # B F C rows columns
    pixels: Tensor  # B T 3 Y X, 0..1
    memory: MemoryTrace
    shares: dict[Role, Tensor]  # role -> B: share of attention mass, mean over steps, layers, heads, queries
    stage_shares: dict[int, dict[Role, Tensor]] = field(default_factory=dict)  # by stage of a pyramid
    first_pictures: tuple[int, ...] = ()  # index in the video of the first picture of each frame


_on_host: ContextVar[bool] = ContextVar("states_on_host", default=False)


@contextmanager
def states_on_host() -> Iterator[None]:
    """Let states be made on the host: a card needs no room for a second memory and decoder, which is gigabytes."""
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


def state_copy(tensor: Tensor) -> Tensor:
    """Return a copy without gaps, for a state."""
    whole = tensor.contiguous()
    if _on_host.get():
        return whole.to("cpu", copy=True)
    return whole.clone() if whole is tensor else whole
