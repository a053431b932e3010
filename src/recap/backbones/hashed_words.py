"""`HashedWords` embeds prompts without weights: for models that have none."""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor


class HashedWords:
    """Embeds a prompt as one random unit Gaussian vector per word, zeros after the last word.

    Different prompts get different embeddings, and no more: words with similar meanings are as far apart as any two.
    """

    def __init__(self, text_len: int, text_dim: int) -> None:
        self.text_len = text_len
        self.text_dim = text_dim

    def __call__(self, prompt: str) -> Tensor:
        """Return 1 text_len text_dim, fp32 on the CPU; words after the last slot are dropped, case is ignored."""
        words = re.findall(r"\w+", prompt.lower())[: self.text_len]
        slots = torch.zeros(1, self.text_len, self.text_dim)
        for index, word in enumerate(words):
            # A checksum, because Python's hash of a string differs between processes.
            generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
            slots[0, index] = torch.randn(self.text_dim, generator=generator)
        return slots
