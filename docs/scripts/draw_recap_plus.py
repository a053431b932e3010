"""Draw the pictures of docs/recap-plus.md: `python docs/scripts/draw_recap_plus.py RUNS`

Generates the story of return.json with three memories, by the embedded model on the CPU, first seed; runs that are in
the folder RUNS already are taken as they are. Writes to docs/images the strips of the three videos, and what two
admission rules take from one and the same video, that of `recap-plus`. It takes about three minutes on 2 cores.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from recap import Run, Shot, generate
from recap.config import choose
from recap.io.report import SILENT
from recap.io.run_folder import LATENTS
from recap.io.trace import BlockTrace, Position
from recap.io.video import Picture, open_clip
from recap.plan import make_plan
from recap.rollout import Resume, rollout
from recap.run import build_backbone, build_memory
from recap.show.clips import tint
from recap.show.sheet import moments_sheet, pictures_sheet
from recap.studio.segments import jpeg_of
from recap.types import Block

HERE = Path(__file__).parent
IMAGES = HERE.parent / "images"
MEMORIES = ("sink", "recap", "recap-plus")
# Late in the empty opening, twice in the first visit, while the fox is away, and twice in the second visit.
MOMENTS = {
    2.0: "2 s: nobody",
    5.0: "5 s: a fox",
    8.0: "8 s",
    14.0: "14 s: nobody",
    19.0: "19 s: the fox again",
    23.0: "23 s",
}


def main() -> None:
    folder = Path(sys.argv[1])
    shots = [Shot(**shot) for shot in json.loads((HERE / "return.json").read_text())]
    runs = {}
    for name in MEMORIES:
        own = folder / name
        done = (own / "run.json").is_file()
        runs[name] = (
            Run(own) if done else generate(shots, memory=name, folder=own, device="cpu", reporter=SILENT)
        )
    save("recap-plus-strips.jpg", moments_sheet({name: run.video for name, run in runs.items()}, MOMENTS))
    save("recap-plus-admitted.jpg", admitted_sheet(runs["recap-plus"]))


def admitted_sheet(run: Run) -> Picture:
    """Show what each rule takes into the bank when somebody comes and goes, of the same pictures."""
    blocks = {"recap-plus, new by keys": read_with(run, "keys"), "recap, new by flow": read_with(run, "flow")}
    for name, found in blocks.items():
        print(f"{name}: {sum(len(new_tokens(line)) for line, _ in found)} tokens entered the bank")
    by_keys, by_flow = blocks.values()
    prompts = [line.prompts for line, _ in by_keys]
    starts = [block for block in range(1, len(prompts)) if prompts[block] != prompts[block - 1]]
    lines: dict[str, list[Picture]] = {name: [] for name in blocks}
    labels = []
    for start, label in zip(starts, ("a fox comes", "nobody", "the fox again"), strict=True):
        # The block in which a prompt begins, and the next one; of each the frame of which most is taken.
        for block in (start, start + 1):
            taken = [frame for found in (by_keys, by_flow) for frame, _, _ in new_tokens(found[block][0])]
            first = by_keys[block][0].first_frame
            index = max(
                range(len(by_keys[block][0].first_pictures)), key=lambda each: taken.count(first + each)
            )
            for name, found in blocks.items():
                lines[name].append(marked(*found[block], index))
            second = by_keys[block][0].first_pictures[index] / open_clip(run.video).fps
            labels.append(f"{second:.1f} s: {label}" if block == start else f"{second:.1f} s")
    return pictures_sheet(lines, labels)


def new_tokens(line: BlockTrace) -> list[Position]:
    """Return the tokens that entered the bank with a block because they showed something new."""
    return [place for place, score in (line.admitted[0] if line.admitted else {}).items() if score > 0]


def read_with(run: Run, rule: str) -> list[tuple[BlockTrace, Tensor]]:
    """Let the memory watch the finished video, its bank filled by a rule; returns the trace and pictures by block."""
    config = replace(run.config, admission=choose("admission", rule))
    backbone = build_backbone(config, SILENT.notice)
    latents = load_file(run.folder / LATENTS)["latents"]

    def of(block: Block) -> Tensor:
        return latents[:, block.first_frame : block.first_frame + block.num_frames]

    made = rollout(
        backbone,
        build_memory(config, backbone.spec, SILENT.notice),
        make_plan([config.shots], backbone.spec),
        seeds=config.seeds,
        resume=Resume(latents_of=of),
    )
    return [(BlockTrace.of(block), block.pixels[0]) for block in made]


def marked(line: BlockTrace, pixels: Tensor, index: int) -> Picture:
    """Show the last picture of one of a block's frames, with the places marked that entered the bank."""
    side, (height, width) = 16, pixels.shape[-2:]
    places = torch.zeros(1, height // side, width // side, dtype=torch.bool)
    for frame, row, column in new_tokens(line):
        places[0, row, column] |= frame == line.first_frame + index
    ends = [first - line.first_pictures[0] for first in line.first_pictures[1:]] + [line.num_pictures]
    shown = (pixels[ends[index] - 1][None].clamp(0, 1) * 255).round().to(torch.uint8)
    made: Picture = tint(shown, places)[0].permute(1, 2, 0).numpy()
    return made


def save(name: str, picture: Picture) -> None:
    (IMAGES / name).write_bytes(jpeg_of(picture))


if __name__ == "__main__":
    main()
