"""Does a subject stay itself in another video? `python -m benchmarks.casting --subjects 100 --device cuda`

Every subject is generated in one scene, saved as `recap cast save` does it (its tokens in one frame, found by the
probe) and cast into another scene with another seed and a prompt that names its kind alone. Compared are the same
videos without a cast, and the two ways to make its keys again: under the new prompt, which is what `--cast` does, and
under the prompt of the video it comes from. The judge is the embedded model's probe; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import print_json
from recap.backbones.tiny.vocabulary import ACTORS
from recap.config import RunConfig
from recap.contracts import Backbone
from recap.eval.judges.colours import colour_distance, mean_colour
from recap.eval.judges.probe import Probe, actor_number, load_probe
from recap.eval.scores import cluster_interval
from recap.io.cast import Subject
from recap.io.report import SILENT
from recap.memory.pinned import join_cast
from recap.plan import Shot, make_plan
from recap.rollout import read_alone, rollout
from recap.run import build_backbone, build_memory, settle_flow
from recap.types import GeneratedBlock

SEA = ("fish", "whale", "boat", "turtle")
AT_SEA = ("in the sea by day", "in the sea at night")
ON_LAND = ("on a beach by day", "in a forest at sunset")
BEFORE_BLOCKS, AFTER_BLOCKS = 4, 7
SAME = 15.0
"""Colours that differ by less, in Delta E, are the same subject's, as in all other measures here."""
WAYS = ("no cast", "cast, new prompt", "cast, old prompt")
# Of the pictures of the new video, every n-th is judged.
EVERY = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds what generates and judges."""

    config: RunConfig
    backbone: Backbone
    probe: Probe

    def generate(
        self, prompt: str, seed: int, blocks: int, cast: Sequence[tuple[Subject, str]] = ()
    ) -> list[GeneratedBlock]:
        """Generate a video, with subjects whose keys are made under these prompts."""
        spec = self.backbone.spec
        policy = build_memory(self.config, spec, SILENT.notice)
        for subject, under in cast:
            join_cast(policy, [subject], (under,), partial(read_alone, self.backbone))
        block_s = spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
        plan = make_plan([[Shot(prompt, blocks * block_s)]], spec)
        return list(rollout(self.backbone, policy, plan, seeds=[seed]))

    def look(self, pixels: Tensor, actor: str) -> tuple[Tensor, float]:
        """Return an actor's mean colour in pictures 1 T 3 Y X, and in how many of them it is found."""
        judged = self.probe.judge(pixels)
        colour, cells = judged.actor_colour(actor)
        found = judged.presence[..., actor_number(actor)] > 0.5
        return mean_colour(found, colour, cells)[0], float(found.float().mean())

    def save(self, made: GeneratedBlock, actor: str) -> Subject | None:
        """Return the subject as the last frame of a block shows it; None where the probe does not find it."""
        cells = self.probe.judge(made.pixels[:, -1:]).cells[0, 0].cpu()
        mask = torch.zeros((made.block.num_frames, *self.backbone.spec.grid), dtype=torch.bool)
        mask[-1] = cells == actor_number(actor)
        if not bool(mask.any()):
            return None
        picture = (made.pixels[0, -1].cpu().permute(1, 2, 0) * 255).to(torch.uint8).numpy()
        return Subject("subject", f"a {actor}", made.latents[0].cpu(), mask, mask.float(), picture)


def measure(stage: Stage, index: int) -> dict[str, tuple[float, float]] | None:
    """Return colour error and share of pictures with the subject, by way; None if it could not be saved."""
    actor = ACTORS[index % len(ACTORS)]
    scenes = AT_SEA if actor in SEA else ON_LAND
    before, after = (f"a {actor} {scene}" for scene in scenes)
    last = stage.generate(before, 1_000 + index, BEFORE_BLOCKS)[-1]
    subject = stage.save(last, actor)
    if subject is None:
        return None
    wanted, _ = stage.look(last.pixels, actor)
    found = {}
    for way, cast in zip(WAYS, ([], [(subject, after)], [(subject, before)]), strict=True):
        made = stage.generate(after, 2_000 + index, AFTER_BLOCKS, cast)
        colour, share = stage.look(torch.cat([each.pixels for each in made], dim=1)[:, ::EVERY], actor)
        found[way] = (float(colour_distance(wanted, colour)), share)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subjects", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--flow", default="auto")
    options = parser.parse_args()
    config = RunConfig(
        shots=(Shot("a fox on a beach by day", 1.0),), device=options.device, flow=options.flow
    )
    backbone = build_backbone(config)
    stage = Stage(settle_flow(config, backbone.spec), backbone, load_probe(device=config.device))
    began, results, kinds = time.perf_counter(), [], []
    for index in range(options.subjects):
        if (one := measure(stage, index)) is not None:
            results.append(one)
            kinds.append(index % len(ACTORS))
        print(f"{index + 1} of {options.subjects}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print("| way | colour error (Delta E) | the same | found in pictures |\n|---|---|---|---|")
    record: dict[str, object] = {"subjects": len(results), "flow": stage.config.flow}
    for way in WAYS:
        errors = [one[way][0] for one in results]
        # A subject that is not found at all is not the same.
        same = [float(math.isfinite(error) and error < SAME) for error in errors]
        seen = [(error, kind) for error, kind in zip(errors, kinds, strict=True) if math.isfinite(error)]
        error = cluster_interval([e for e, _ in seen], [k for _, k in seen])
        share = cluster_interval(same, kinds)
        found = sum(one[way][1] for one in results) / len(results)
        print(
            f"| {way} | {error.mean:.1f} [{error.low:.1f}, {error.high:.1f}] "
            f"| {share.mean:.0%} [{share.low:.0%}, {share.high:.0%}] | {found:.0%} |"
        )
        record[way] = {"errors": errors, "same": share.mean, "found": found}
    print_json("casting", config.device, record)


if __name__ == "__main__":
    main()
