"""Does a bank keep late subjects through rain and ripples?  `python -m benchmarks.texture --seconds 60 --seeds 0,1`

In synthetic scenes each token is known to show a subject's first appearance, the subject later on, or texture. For
each rule, after the whole clip, it reports the share of first appearances that the bank has, and the share of its
slots that texture took with a score above 0. On scenes without texture it reports how far the banks of `flow` and
`flow-texture` agree (sources in both over sources in either, scores above 0). --wall FOLDER writes pictures of the
banks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.scenes import CLEAR, FLEETING, Rendered, Scene, half, make_scene, piece, render
from benchmarks.timing import print_json
from recap.contracts import Admission, Flow, FlowEstimator
from recap.flow import build_flow
from recap.flow.warp import backtrace, inside
from recap.io.framing import cut_tokens
from recap.memory.bank import NoveltyBank
from recap.registry import ADMISSIONS
from recap.show.sheet import Patches, contact_sheet, write_png
from recap.types import BackboneSpec, Block, Candidates

TEXTURED = ("rain", "ripples")
CALM = ("static", "pan", "pan-return", "entering", "hiding", "returning", "burst", "demo")
RULES = ("flow", "flow-texture")
COUNTS = ("first", "num_first", "later", "texture", "scenery", "unused")
# In a shorter clip the late subjects have no time to enter.
SHORTEST_S, LONGEST_S = 10.0, 3600.0
FIRST_SHARE = 1 / 8
"""A token shows a first appearance if this share of it, summed over its pictures, entered from outside."""

SPEC = BackboneSpec(
    name="scenes",
    layers=1,
    heads=1,
    head_dim=1,
    grid=(8, 13),
    token_pixels=16,
    latent_channels=1,
    latent_size=(8, 13),
    frames_per_block=3,
    window_frames=6,
    pictures_per_frame=4,
    pictures_per_second=16,
)


@dataclass(frozen=True, slots=True)
class Truth:
    """What the tokens of a clip show, as shares of their pixels, F rows columns each."""

    first: Tensor
    subject: Tensor
    fleeting: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The final bank of a rule, counted in slots.

    There were `num_first` first appearances, of which the bank has `first`; `later` are subjects but not their first
    appearance, `scenery` is anything else with a score above 0, `unused` slots have a score of 0. `seconds` is the
    time the rule took, with flow, and `sources` are the positions with a score above 0.
    """

    rule: str
    num_first: int
    first: int
    later: int
    texture: int
    scenery: int
    unused: int
    seconds: float
    sources: frozenset[tuple[int, ...]]
    patches: Patches

    @property
    def kept(self) -> float:
        return self.first / max(self.num_first, 1)

    @property
    def on_texture(self) -> float:
        return self.texture / SPEC.frame_tokens


def watch(scene: Scene, flow: str, rules: tuple[str, ...] = RULES) -> list[Outcome]:
    """Stream a scene through several rules, each with a bank of one frame's tokens."""
    exact: list[Flow] = []
    estimator: FlowEstimator = (lambda pictures: exact[-1]) if flow == "exact" else build_flow(flow)
    admissions: list[Admission] = [ADMISSIONS[rule]().build(SPEC, estimator) for rule in rules]
    banks = [NoveltyBank(SPEC.frame_tokens, 1) for _ in rules]
    seconds, parts = [0.0] * len(rules), []
    for block, seen, truth in _blocks(scene):
        exact[:] = [Flow(half(seen.forward)[None], half(seen.backward)[None])]
        parts.append(truth)
        pictures = seen.pictures[1 if block.index else 0 :]
        for index, (admission, bank) in enumerate(zip(admissions, banks, strict=True)):
            began = time.perf_counter()
            _offer(block, pictures, admission, bank)
            seconds[index] += time.perf_counter() - began
    whole = Truth(*(torch.cat([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Truth)))
    return [_judge(*each, whole) for each in zip(rules, banks, seconds, strict=True)]


def agreement(one: Outcome, other: Outcome) -> float:
    """Return the sources in both banks over the sources in either; 1 if both are empty."""
    either = one.sources | other.sources
    return len(one.sources & other.sources) / len(either) if either else 1.0


def _blocks(scene: Scene) -> Iterator[tuple[Block, Rendered, Truth]]:
    """Render one block at a time, with the picture before it, so that long clips need no memory."""
    start, index = 0, 0
    while start < scene.num_pictures:
        end = SPEC.num_pictures((index + 1) * SPEC.frames_per_block)
        part = piece(scene, max(start - 1, 0), end)
        seen, dry = render(part), render(dataclasses.replace(part, weather=CLEAR))
        block = Block(index, index * SPEC.frames_per_block, SPEC.frames_per_block, ("",))
        yield block, seen, _truth(seen, dry, is_first=index == 0)
        start, index = end, index + 1


def _truth(seen: Rendered, dry: Rendered, *, is_first: bool) -> Truth:
    """Find subjects in the scene without its weather, so that a drop in front of them changes nothing."""
    came = torch.zeros_like(dry.actor, dtype=torch.bool)
    came[1:] = (dry.actor[1:] > 0) & ~inside(backtrace(dry.backward), SPEC.picture_size)
    lead = 0 if is_first else 1

    def per_token(shown: Tensor) -> Tensor:
        tokens = functional.avg_pool2d(shown[lead:].float()[None], SPEC.token_pixels)[0]
        alone = 1 if is_first else 0
        frames = tokens[alone:].unflatten(0, (-1, SPEC.pictures_per_frame)).sum(dim=1)
        return torch.cat([tokens[:alone], frames])

    return Truth(per_token(came), per_token(dry.actor > 0), per_token(seen.actor == FLEETING))


def _offer(block: Block, pictures: Tensor, admission: Admission, bank: NoveltyBank) -> None:
    proposed = admission.propose(block, pictures[None])
    # The first frame belongs to the sink.
    skip = 0 if block.index else SPEC.frame_tokens
    last = torch.arange(len(pictures) - 1, -1, -SPEC.pictures_per_frame).flip(0)
    picture = last[:, None, None].expand(-1, *SPEC.grid)
    patches = cut_tokens((pictures * 255).round().to(torch.uint8), picture).reshape(
        1, 1, proposed.count, 1, -1
    )
    offered = Candidates(proposed.source[:, skip:], proposed.score[:, skip:])
    # The patches stand in for keys and values, so that the bank can be shown.
    bank.admit(offered, patches[:, :, skip:], patches[:, :, skip:], admission.retain)


def _judge(rule: str, bank: NoveltyBank, seconds: float, truth: Truth) -> Outcome:
    source, score = bank.entries.source[0], bank.entries.score[0]
    at = tuple(source.unbind(-1))
    used = score > 0
    first = used & (truth.first[at] >= FIRST_SHARE)
    later = used & ~first & (truth.subject[at] >= FIRST_SHARE)
    texture = used & ~first & ~later & (truth.fleeting[at] > 0)
    order = (source[:, 0] * SPEC.frame_tokens + source[:, 1] * SPEC.grid[1] + source[:, 2]).argsort()
    shown = order[used[order]]
    side = SPEC.token_pixels
    patches = bank.keys[0, 0, shown, 0].reshape(-1, side, side, 3)
    frames, rows, columns = source[shown].T.numpy()
    when = frames * SPEC.pictures_per_frame / SPEC.pictures_per_second
    return Outcome(
        rule=rule,
        num_first=int((truth.first >= FIRST_SHARE).sum()),
        first=int(first.sum()),
        later=int(later.sum()),
        texture=int(texture.sum()),
        scenery=int((used & ~first & ~later & ~texture).sum()),
        unused=int((~used).sum()),
        seconds=seconds,
        sources=frozenset(tuple(each) for each in source[used].tolist()),
        patches=Patches(patches.numpy(), when, frames, rows, columns, score[shown].numpy()),
    )


def measure(seconds: float, seeds: list[int], flows: list[str], wall: Path | None) -> list[dict[str, object]]:
    """Measure every scene, flow, seed and rule."""
    size, results = SPEC.picture_size, []
    for name in (*TEXTURED, *CALM):
        num_blocks = max(2, round((seconds if name in TEXTURED else min(seconds, 10)) / 0.75))
        num_pictures = SPEC.num_pictures(num_blocks * SPEC.frames_per_block)
        for flow in flows:
            for seed in seeds if name in TEXTURED else seeds[:1]:
                outcomes = watch(make_scene(name, size, num_pictures, seed), flow)
                for outcome in outcomes:
                    counts = dataclasses.asdict(outcome)
                    del counts["sources"], counts["patches"]
                    shares = {"kept": outcome.kept, "on_texture": outcome.on_texture}
                    about = {"scene": name, "flow": flow, "seed": seed, "pictures": num_pictures}
                    agrees = {"agreement": agreement(outcomes[0], outcome)}
                    results.append({**about, **counts, **shares, **agrees})
                    if wall is not None and name in TEXTURED:
                        path = wall / f"wall-{name}-{flow}-{seed}-{outcome.rule}.png"
                        write_png(path, contact_sheet(outcome.patches, scale=2))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", default="0", help="seeds of the textured scenes, e.g. 0,1,2")
    parser.add_argument("--flows", default="exact,classical")
    parser.add_argument("--wall", type=Path, help="folder for pictures of the banks")
    chosen = parser.parse_args()
    if chosen.wall is not None:
        chosen.wall.mkdir(parents=True, exist_ok=True)
    if not all(seed.isdigit() for seed in chosen.seeds.split(",")):
        sys.exit(f"error: --seeds is {chosen.seeds!r}: must be whole numbers; for example 0,1,2")
    if not SHORTEST_S <= chosen.seconds <= LONGEST_S:
        sys.exit(f"error: --seconds is {chosen.seconds}: must be {SHORTEST_S} to {LONGEST_S}; for example 60")
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    results = measure(chosen.seconds, seeds, chosen.flows.split(","), chosen.wall)
    shown = ("scene", "flow", "seed", "rule", "kept", *COUNTS)
    table = Table(*shown, "on texture", "agreement", "s")
    for found in results:
        shares = (f"{found['on_texture']:.2f}", f"{found['agreement']:.3f}", f"{found['seconds']:.1f}")
        cells = (f"{value:.2f}" if isinstance(value := found[key], float) else str(value) for key in shown)
        table.add_row(*cells, *shares)
    Console(width=150).print(table)
    print_json("texture", "cpu", {"seconds": chosen.seconds, "results": results})


if __name__ == "__main__":
    main()
