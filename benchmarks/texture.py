"""Does a bank keep late subjects through rain and ripples?  `python -m benchmarks.texture --seconds 60 --seeds 0,1`

Made scenes say of every token whether it shows a subject's first appearance, the subject later on, or texture.
Reported for each rule, after the whole clip: the share of first appearances that the bank holds, and the share
of its slots that texture won with a score above 0. On scenes without texture: how far the banks of `flow` and
`flow-texture` agree (sources in both over sources in either, scores above 0). --wall FOLDER draws the banks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from recap.contracts import Admission, Flow, FlowEstimator
from recap.flow import build_flow
from recap.flow.warp import backtrace, inside
from recap.io.framing import cut_tokens
from recap.memory.bank import NoveltyBank
from recap.registry import ADMISSIONS
from recap.show.png import write_png
from recap.show.sheet import Patches, contact_sheet
from recap.types import BackboneSpec, Block, Candidates

TEXTURED = ("rain", "ripples")
CALM = ("static", "pan", "pan-return", "entering", "hiding", "returning", "burst", "demo")
RULES = ("flow", "flow-texture")
SHORTEST_S, LONGEST_S = 10.0, 3600.0  # below, the late subjects have no time to come in
FIRST_SHARE = 1 / 8
"""A token shows a first appearance if so much of it, summed over its pictures, came in from outside."""

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


@dataclass
class Told:
    """The exact flow of the block at hand, in an estimator's place."""

    now: Flow | None = None

    def __call__(self, pictures: Tensor) -> Flow:
        assert self.now is not None
        return self.now


@dataclass(frozen=True, slots=True)
class Truth:
    """What the tokens of a clip show, F rows columns each, as shares of their pixels."""

    first: Tensor
    subject: Tensor
    fleeting: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule's bank holds of a clip in the end; the counts are of slots."""

    rule: str
    num_first: int  # first appearances there were
    first: int  # of them held
    later: int  # subjects, but not their first appearance
    texture: int
    scenery: int  # anything else with a score above 0
    unused: int  # filled with a score of 0
    seconds: float  # that the rule took for the clip, flow included
    held: frozenset[tuple[int, ...]]  # sources with a score above 0
    patches: Patches

    @property
    def kept(self) -> float:
        return self.first / max(self.num_first, 1)

    @property
    def on_texture(self) -> float:
        return self.texture / SPEC.frame_tokens


def watch(scene: Scene, flow: str, rules: tuple[str, ...] = RULES) -> list[Outcome]:
    """Stream a scene through several rules, each with a bank of one frame's tokens."""
    told = Told()
    estimator: FlowEstimator = told if flow == "exact" else build_flow(flow)
    admissions: list[Admission] = [ADMISSIONS[rule]().build(SPEC, estimator) for rule in rules]
    banks = [NoveltyBank(SPEC.frame_tokens, 1) for _ in rules]
    seconds, parts = [0.0] * len(rules), []
    for block, seen, truth in _blocks(scene):
        told.now = Flow(half(seen.forward)[None], half(seen.backward)[None])
        parts.append(truth)
        pictures = seen.pictures[1 if block.index else 0 :]
        for index, (admission, bank) in enumerate(zip(admissions, banks, strict=True)):
            began = time.perf_counter()
            _offer(block, pictures, admission, bank)
            seconds[index] += time.perf_counter() - began
    whole = Truth(*(torch.cat([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Truth)))
    return [_judge(*each, whole) for each in zip(rules, banks, seconds, strict=True)]


def agreement(one: Outcome, other: Outcome) -> float:
    """Sources that both banks hold over sources that either does; 1 where both hold none."""
    return len(one.held & other.held) / len(either) if (either := one.held | other.held) else 1.0


def _blocks(scene: Scene) -> Iterator[tuple[Block, Rendered, Truth]]:
    """A block at a time, drawn with the picture before it, so that length costs no memory."""
    start, index = 0, 0
    while start < scene.num_pictures:
        end = SPEC.num_pictures((index + 1) * SPEC.frames_per_block)
        part = piece(scene, max(start - 1, 0), end)
        seen, dry = render(part), render(dataclasses.replace(part, weather=CLEAR))
        block = Block(index, index * SPEC.frames_per_block, SPEC.frames_per_block, ("",))
        yield block, seen, _truth(seen, dry, opening=index == 0)
        start, index = end, index + 1


def _truth(seen: Rendered, dry: Rendered, *, opening: bool) -> Truth:
    """The subjects are those of the scene without its weather, so that a drop before them changes nothing."""
    came = torch.zeros_like(dry.actor, dtype=torch.bool)
    came[1:] = (dry.actor[1:] > 0) & ~inside(backtrace(dry.backward), SPEC.picture_size)
    lead = 0 if opening else 1

    def per_token(shown: Tensor) -> Tensor:
        tokens = functional.avg_pool2d(shown[lead:].float()[None], SPEC.token_pixels)[0]
        alone = 1 if opening else 0
        frames = tokens[alone:].unflatten(0, (-1, SPEC.pictures_per_frame)).sum(dim=1)
        return torch.cat([tokens[:alone], frames])

    return Truth(per_token(came), per_token(dry.actor > 0), per_token(seen.actor == FLEETING))


def _offer(block: Block, pictures: Tensor, admission: Admission, bank: NoveltyBank) -> None:
    proposed = admission.propose(block, pictures[None])
    skip = 0 if block.index else SPEC.frame_tokens  # the sink owns the first frame
    last = torch.arange(len(pictures) - 1, -1, -SPEC.pictures_per_frame).flip(0)
    place = last[:, None, None].expand(-1, *SPEC.grid)
    looks = cut_tokens((pictures * 255).round().to(torch.uint8), place).reshape(1, 1, proposed.count, 1, -1)
    offered = Candidates(proposed.source[:, skip:], proposed.score[:, skip:])
    bank.admit(offered, looks[:, :, skip:], looks[:, :, skip:], admission.retain)


def _judge(rule: str, bank: NoveltyBank, seconds: float, truth: Truth) -> Outcome:
    source, score = bank.held.source[0], bank.held.score[0]
    at = tuple(source.unbind(-1))
    used = score > 0
    first = used & (truth.first[at] >= FIRST_SHARE)
    later = used & ~first & (truth.subject[at] >= FIRST_SHARE)
    texture = used & ~first & ~later & (truth.fleeting[at] > 0)
    order = (source[:, 0] * SPEC.frame_tokens + source[:, 1] * SPEC.grid[1] + source[:, 2]).argsort()
    shown = order[used[order]]
    side = SPEC.token_pixels
    looks = bank.keys[0, 0, shown, 0].reshape(-1, side, side, 3)
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
        held=frozenset(tuple(each) for each in source[used].tolist()),
        patches=Patches(looks.numpy(), when, frames, rows, columns, score[shown].numpy()),
    )


def measure(seconds: float, seeds: list[int], flows: list[str], wall: Path | None) -> list[dict[str, object]]:
    """A row for every scene, flow, seed and rule."""
    size, rows = SPEC.picture_size, []
    for name in (*TEXTURED, *CALM):
        num_blocks = max(2, round((seconds if name in TEXTURED else min(seconds, 10)) / 0.75))
        num_pictures = SPEC.num_pictures(num_blocks * SPEC.frames_per_block)
        for flow in flows:
            for seed in seeds if name in TEXTURED else seeds[:1]:
                outcomes = watch(make_scene(name, size, num_pictures, seed), flow)
                for outcome in outcomes:
                    row = dataclasses.asdict(outcome) | {
                        "kept": outcome.kept,
                        "on_texture": outcome.on_texture,
                    }
                    del row["held"], row["patches"]
                    agrees = agreement(outcomes[0], outcome)
                    about = {"scene": name, "flow": flow, "seed": seed, "pictures": num_pictures}
                    rows.append({**about, **row, "agreement": agrees})
                    if wall is not None and name in TEXTURED:
                        path = wall / f"wall-{name}-{flow}-{seed}-{outcome.rule}.png"
                        write_png(path, contact_sheet(outcome.patches, scale=2))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", default="0", help="of the textured scenes, e.g. 0,1,2")
    parser.add_argument("--flows", default="exact,classical")
    parser.add_argument("--wall", type=Path, help="a folder for pictures of the banks")
    chosen = parser.parse_args()
    if chosen.wall is not None:
        chosen.wall.mkdir(parents=True, exist_ok=True)
    if not all(seed.isdigit() for seed in chosen.seeds.split(",")):
        sys.exit(f"error: --seeds is {chosen.seeds!r}: must be whole numbers; for example 0,1,2")
    if not SHORTEST_S <= chosen.seconds <= LONGEST_S:
        sys.exit(
            f"error: --seconds is {chosen.seconds}: must be {SHORTEST_S} to {LONGEST_S}; 60 is the claim's"
        )
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    rows = measure(chosen.seconds, seeds, chosen.flows.split(","), chosen.wall)
    shown = (
        "scene",
        "flow",
        "seed",
        "rule",
        "kept",
        "first",
        "num_first",
        "later",
        "texture",
        "scenery",
        "unused",
    )
    table = Table(*shown, "on texture", "agreement", "s")
    for row in rows:
        shares = (f"{row['on_texture']:.2f}", f"{row['agreement']:.3f}", f"{row['seconds']:.1f}")
        table.add_row(*(f"{v:.2f}" if isinstance(v := row[key], float) else str(v) for key in shown), *shares)
    Console(width=150).print(table)
    print(
        json.dumps({"bench": "texture", "torch": torch.__version__, "seconds": chosen.seconds, "rows": rows})
    )


if __name__ == "__main__":
    main()
