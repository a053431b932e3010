"""Time ways to read the window of a block on a GPU: all keys at once, groups next to each other, keys in parts.

Run it as `python -m benchmarks.attention`. One kernel's programs all take equally long, and at 4,680 queries of 12
heads there are 444 of them (of 128 queries each) for 132 processors: four rounds, the last of which is a third full.
A part of the keys makes shorter programs, so less is lost in the last round, but its results must be merged.

Each time is of one call per layer of the 1.3B model, replayed as one CUDA graph, with keys of several layers so that
they come from memory. Every way is first compared with float32. Without a GPU it only compares, at a small size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.products import SETS, Measured
from benchmarks.timing import print_json
from recap.attention.attend import read_group
from recap.backbones.wan.spec import WAN_1_3B
from recap.fast.dit import choose_kernels
from recap.fast.graphs import SideStream
from recap.rollout import at_once

Part = tuple[Tensor, Tensor]
"""What was read, B H N D, and its log-sum-exp, B H N."""


def merge(parts: list[Part]) -> Tensor:
    """Return B N (H D) of parts without a bias."""
    outputs, masses = zip(*parts, strict=True)
    merged = choose_kernels(outputs[0].device).merge(outputs, masses, [None] * len(parts))[0]
    assert isinstance(merged, Tensor)
    return merged


class Reading:
    """Keeps a layer's queries, keys and values B N H D, and reads them; `first` keys are a group of their own."""

    def __init__(self, queries: int, keys: int, first: int, device: torch.device) -> None:
        heads, channels = WAN_1_3B.heads, WAN_1_3B.head_dim
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.query, self.keys, self.values = (
            torch.randn(1, size, heads, channels, device=device, dtype=kind) for size in (queries, keys, keys)
        )
        self.first = first
        self.aside = SideStream(device, first=True) if device.type == "cuda" else at_once

    def meant(self) -> Tensor:
        """Return B N (H D) in float32."""
        q, k, v = (part.transpose(1, 2).float() for part in (self.query, self.keys, self.values))
        return read_group(q, k, v, None)[0].transpose(1, 2).flatten(2)

    def read(self, start: int, end: int) -> Part:
        """Read some keys by one kernel."""
        q, k, v = (
            part.transpose(1, 2) for part in (self.query, self.keys[:, start:end], self.values[:, start:end])
        )
        return read_group(q, k, v, None)

    def parts(self, start: int, count: int) -> list[Part]:
        """Read all keys from `start` on in equal parts, as rows of a batch of one kernel."""
        query = self.query.expand(count, -1, -1, -1).contiguous()
        kept = (part[:, start:].unflatten(1, (count, -1)).squeeze(0) for part in (self.keys, self.values))
        q, k, v = (part.transpose(1, 2) for part in (query, *kept))
        output, mass = read_group(q, k, v, None)
        return list(zip(output.split(1), mass.split(1), strict=True))

    def next_to(self, large: Callable[[], list[Part]], small: Callable[[], list[Part]]) -> list[Part]:
        """Do one on a stream of its own, first in line, and the other next to it."""
        found: list[Part] = []
        wait = self.aside(lambda: found.extend(large()))
        parts = small()
        wait()
        return parts + found

    def all_at_once(self) -> Tensor:
        return self.read(0, self.keys.shape[1])[0].transpose(1, 2).flatten(2)

    def in_parts(self, count: int) -> Tensor:
        return merge(self.parts(0, count))

    def halves_next_to_each_other(self) -> Tensor:
        half, end = self.keys.shape[1] // 2, self.keys.shape[1]
        return merge(self.next_to(lambda: [self.read(0, half)], lambda: [self.read(half, end)]))

    def groups_in_turn(self) -> Tensor:
        return merge([self.read(0, self.first), self.read(self.first, self.keys.shape[1])])

    def groups_next_to_each_other(self, count: int = 1) -> Tensor:
        """What `recap.fast.dit` does where the first frame has a bias; with the large group in parts if asked for."""
        return merge(self.next_to(lambda: self.parts(self.first, count), lambda: [self.read(0, self.first)]))


def ways(first: int) -> dict[str, Callable[[Reading], Tensor]]:
    """Name the ways to read: those of a window without a bias, or those with a first group of its own."""
    if not first:
        return {
            "one kernel": Reading.all_at_once,
            "halves, one kernel": partial(Reading.in_parts, count=2),
            "thirds, one kernel": partial(Reading.in_parts, count=3),
            "halves, two streams": Reading.halves_next_to_each_other,
        }
    return {
        "groups in turn": Reading.groups_in_turn,
        "groups on two streams (what runs do)": Reading.groups_next_to_each_other,
        "the same, the large one in halves": partial(Reading.groups_next_to_each_other, count=2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--frame", type=int, default=1560 if on_gpu else 12, help="tokens of a frame, a multiple of 6"
    )
    frame = parser.parse_args().frame
    torch.manual_seed(0)
    measured = Measured()
    windows = {"sink": (6, 0), "bank, lambda 1": (7, 0), "bank, lambda 5": (7, 1)}
    with torch.no_grad():
        for name, (frames, first) in windows.items():
            layers = [Reading(3 * frame, frames * frame, first * frame, device) for _ in range(SETS)]
            for way, read in ways(first).items():
                measured.measure(
                    f"{name}: {way}", [partial(read, layer) for layer in layers], layers[0].meant()
                )
    print_json("attention", device.type, {"frame": frame, "ms": measured.ms, "errors": measured.errors})


if __name__ == "__main__":
    main()
