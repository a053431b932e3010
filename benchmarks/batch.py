"""What do several sessions gain from one forward? `python -m benchmarks.batch --sessions 4 8 --blocks 12`

Sessions as a studio keeps them, with their states and what a page shows of attention, generate blocks once their
memories are full: first in turn, then as rows of one batch. For comparison, as many rows of one rollout, which share
one memory, as tables generate them. Then it is checked that no session's bits depend on the others: alone in a batch
of that width, among others, and among the same in reverse order. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.timing import print_json
from recap.config import RunConfig
from recap.contracts import Backbone
from recap.fast.accelerate import choose_aside
from recap.fast.stopwatch import Stopwatch
from recap.fast.threads import use_fair_threads
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.run import build_backbone, build_memory
from recap.session import Session
from recap.session.batcher import Batcher, step_together
from recap.studio.track import HISTORY_S, STATES_BYTES, pictures_of
from recap.studio.watching import WatchingKernels
from recap.types import GeneratedBlock

PROMPTS = ("a fox on a beach by day", "a bus on a beach by day", "a cat on a beach by day")
FILL_BLOCKS = 4
"""After so many blocks the embedded model's memory is full, and everything that is recorded was recorded."""
STAGES = ("denoise", "settle", "decode", "look", "commit", "take")


class Bench:
    """Holds the model, and makes sessions on it."""

    def __init__(self, device: str, flow: str, blocks: int) -> None:
        self.device, self.flow, self.blocks = device, flow, blocks
        self.backbone: Backbone = build_backbone(self.config(0), lambda line: None)

    def config(self, number: int) -> RunConfig:
        return RunConfig.from_dict(
            {
                "shots": [{"prompt": PROMPTS[number % len(PROMPTS)], "seconds": 1.0}],
                "seeds": [number],
                "device": self.device,
                "flow": self.flow,
            }
        )

    def sessions(self, count: int, batcher: Batcher) -> list[Session]:
        """Make sessions as a track of a studio does."""
        more: dict[str, Any] = {"history_s": HISTORY_S, "states_bytes": STATES_BYTES, "batcher": batcher}
        return [
            Session(self.config(number), backbone=self.backbone, kernels=WatchingKernels(), **more)
            for number in range(count)
        ]

    def rate(self, count: int, step: Callable[[], Sequence[GeneratedBlock]]) -> float:
        """Return blocks a second of all sessions, pictures fetched, once their memories are full."""
        # On a CPU the time of this process, which others on the machine do not lengthen; take one thread.
        clock = time.perf_counter if self.device.startswith("cuda") else time.process_time
        seconds = []
        for block in range(FILL_BLOCKS + self.blocks):
            began = clock()
            for made in step():
                pictures_of(made)
            if block >= FILL_BLOCKS:
                seconds.append(clock() - began)
        return count / statistics.median(seconds)

    def in_turn(self, count: int) -> float:
        sessions = self.sessions(count, Batcher())
        return self.rate(count, lambda: [session.step() for session in sessions])

    def together(self, count: int) -> tuple[float, dict[str, float]]:
        """Return the rate, and of another few blocks the milliseconds of each stage, summed over the rows."""
        sessions = self.sessions(count, Batcher(count))
        rate = self.rate(count, lambda: step_together(sessions))
        watch = Stopwatch(self.device.startswith("cuda"))
        methods: list[tuple[object, str]] = [(self.backbone, "denoise"), (self.backbone, "settle")]
        for each in sessions:
            methods += [(each._decoder, "decode"), (each, "take")]
            methods += [(each._policy, "look"), (each._policy, "commit")]
        with watch.timing(methods):
            for _ in range(4):
                step_together(sessions)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return rate, {stage: round(sum(watch.milliseconds(stage)) / 4, 2) for stage in STAGES}

    def as_rows(self, count: int) -> float:
        """Return the rate of one rollout of so many rows, without sessions around them."""
        configs = [self.config(number) for number in range(count)]
        spec = self.backbone.spec
        seconds = 2.0 * (FILL_BLOCKS + self.blocks)
        plan = make_plan([(Shot(each.shots[0].prompt, seconds),) for each in configs], spec)
        blocks = rollout(
            self.backbone,
            build_memory(configs[0], spec, lambda line: None),
            plan,
            seeds=[each.seeds[0] for each in configs],
            aside=choose_aside(self.device),
        )
        return self.rate(count, lambda: _rows(blocks))

    def same_bits(self, count: int) -> dict[str, bool | float]:
        """Compare a session's blocks whoever is generated with it, and with those that it generates by itself."""
        batcher, blocks = Batcher(count), FILL_BLOCKS + 2

        def run(sessions: list[Session], number: int) -> torch.Tensor:
            made = [step_together(sessions)[sessions.index(number_of[number])] for _ in range(blocks)]
            return torch.cat([each.latents for each in made], dim=1)

        found = {}
        for name in ("alone", "among others", "in reverse"):
            sessions = self.sessions(count, batcher)
            number_of = dict(enumerate(sessions))
            order = {"alone": sessions[:1], "among others": sessions, "in reverse": sessions[::-1]}[name]
            found[name] = run(order, 0)
        (by_itself,) = self.sessions(1, Batcher())
        plain = torch.cat([by_itself.step().latents for _ in range(blocks)], dim=1)
        first = found["alone"]
        off = (first - plain).abs().amax(dim=(0, 2, 3, 4))
        length = self.backbone.spec.frames_per_block
        return {
            "others": torch.equal(first, found["among others"]),
            "places": torch.equal(first, found["in reverse"]),
            "width_1": torch.equal(first, plain),
            "off_width_1_first_block": float(off[:length].max()),
            "off_width_1_last_block": float(off[-length:].max()),
        }


def _rows(blocks: Iterator[GeneratedBlock]) -> list[GeneratedBlock]:
    made = next(blocks)
    # All rows' pictures are fetched, as all sessions' are.
    made.pixels.cpu()
    return [made]


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--flow", default="auto")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 8, 16] if cuda else [4])
    parser.add_argument("--blocks", type=int, default=12 if cuda else 6)
    parser.add_argument("--seconds", type=float, default=50.0, help="begin no further number after so many")
    asked = parser.parse_args()
    if min(asked.sessions) < 1 or asked.blocks < 1:
        parser.error("--sessions and --blocks must be 1 or more")
    use_fair_threads()
    bench, began, results = Bench(asked.device, asked.flow, asked.blocks), time.perf_counter(), []
    for count in asked.sessions:
        if time.perf_counter() - began > asked.seconds:
            break
        rate, stages = bench.together(count)
        alone, rows = bench.in_turn(count), bench.as_rows(count)
        bits = bench.same_bits(count)
        results.append(
            {
                "sessions": count, "in_turn": alone, "together": rate, "rows": rows, "ms": stages, "bits": bits
            }
        )  # fmt: skip
        print(f"{count} sessions: {alone:.2f} blocks/s in turn, {rate:.2f} together, {rows:.2f} as rows")
        print(f"  ms of all rows, by stage: {stages}; bits: {bits}", flush=True)
    print_json("batch", asked.device, {"blocks": asked.blocks, "results": results})


if __name__ == "__main__":
    main()
