"""This module pins the subjects of a cast in a memory, with keys and values made by the model at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from recap.contracts import MemoryPolicy
from recap.io.cast import Subject
from recap.types import Candidates

ReadAlone = Callable[[Tensor, tuple[str, ...]], tuple[Tensor, Tensor]]
"""Returns the clean keys and values, L B N H D, of one block of latents under these prompts."""


def join_cast(
    policy: MemoryPolicy,
    subjects: Sequence[Subject],
    prompts: tuple[str, ...],
    read: ReadAlone,
) -> None:
    """Pin every subject in all rows of the batch; `prompts`, one per row, are those of the video it joins."""
    for subject in subjects:
        rows = len(prompts)
        keys, values = read(subject.latents[None].expand(rows, -1, -1, -1, -1).contiguous(), prompts)
        chosen = subject.mask.flatten().nonzero()[:, 0].to(keys.device)
        source = subject.mask.nonzero().to(keys.device).expand(rows, -1, -1).contiguous()
        score = subject.scores[subject.mask].to(keys.device).expand(rows, -1).contiguous()
        policy.take_cast(subject.name, keys[:, :, chosen], values[:, :, chosen], Candidates(source, score))
