"""This module does what the nodes promise, without ComfyUI: it reads their widgets, generates, and shows the bank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap import RunConfig, Session, Shot, build_backbone, make_plan
from recap.config import choose, override, refuse_code
from recap.contracts import Backbone
from recap.errors import refuse
from recap.fast.fitting import fit_card
from recap.io.trace import BlockTrace, bank_before, pictures_of_frames
from recap.plan import LONGEST_S
from recap.show.page import describe_bank
from recap.show.sheet import contact_sheet, cut_out, gather_patches, write_png
from recap.types import BackboneSpec, GeneratedBlock

CHANGES = {
    "cut": {"cut": True, "reread": False},
    "keep recent frames": {"cut": False, "reread": False},
    "reread recent frames": {"cut": False, "reread": True},
}
"""What happens to the recent frames where the next prompt begins."""


def read_settings(part: str, name: str, text: str) -> dict[str, Any]:
    """Read the lines name=value of a settings box; a workflow may come from anybody, so it names no code."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    values = override({part: {"name": name}}, [f"{part}.{line}" for line in lines])
    refuse_code(values, "this workflow")
    # Made once here, so that what is wrong is reported by the node that has it.
    choose(part, values[part])
    return values


def read_schedule(text: str, change: str) -> tuple[Shot, ...]:
    """Read a schedule: a line per prompt, SECONDS: PROMPT."""
    shots = []
    for number, line in enumerate(text.splitlines(), 1):
        seconds, colon, prompt = (part.strip() for part in line.partition(":"))
        if not line.strip():
            continue
        try:
            length = float(seconds)
        except ValueError:
            length = None
        if length is None or not colon or not prompt:
            raise refuse(
                f"line {number}", line, "must read SECONDS: PROMPT", "for example 4: a fox on a beach by day"
            )
        shots.append(Shot(prompt, length, **CHANGES[change]))
    if not shots:
        raise refuse("schedule", text, "has no prompt", "write a line such as 4: a fox on a beach by day")
    return tuple(shots)


@dataclass
class LazyModel:
    """Is a model that is loaded when it first generates, since the text encoder reads the prompts before that."""

    values: dict[str, Any]
    _loaded: Backbone | None = field(default=None, repr=False)
    _eager: bool = False

    def load(self, config: RunConfig) -> tuple[Backbone, RunConfig]:
        """Return the model, which stays loaded as long as the node's settings are the same, and the config.

        Where the fast path does not fit the card, both are of the readable one.
        """
        if self._loaded is None:
            fitted = fit_card(config, print)
            self._loaded, self._eager = build_backbone(fitted), fitted.eager
        return self._loaded, replace(config, eager=self._eager)


@dataclass(frozen=True)
class Generated:
    """Holds a finished video and what its memory did."""

    pictures: Tensor  # T Y X 3 in 0..1, on the CPU
    trace: tuple[BlockTrace, ...]
    spec: BackboneSpec


OnBlock = Callable[[int, int, Tensor], None]
"""It is called with (blocks finished, blocks in all, pictures T Y X 3 of the last one)."""


def generate(
    model: LazyModel,
    memory: dict[str, Any],
    shots: tuple[Shot, ...],
    seed: int,
    start_image: Tensor | None,
    on_block: OnBlock,
) -> Generated:
    """Generate the whole schedule, block by block."""
    plain = {"shots": [asdict(shot) for shot in shots], "seeds": [seed]}
    config = RunConfig.from_dict({**model.values, **memory, **plain})
    with tempfile.TemporaryDirectory(prefix="recap-comfyui-") as folder:
        if start_image is not None:
            config = replace(config, opening=str(_write_opening(Path(folder), start_image)))
        backbone, config = model.load(config)
        # Nobody goes back in this video, so no earlier state of its memory is kept.
        session = Session(config, backbone=backbone, history_s=LONGEST_S, states_bytes=0)
    made = list(_blocks(session, backbone, on_block))
    pictures = torch.cat([shown for shown, _ in made])
    return Generated(pictures, tuple(line for _, line in made), backbone.spec)


def _blocks(session: Session, backbone: Backbone, on_block: OnBlock) -> Iterator[tuple[Tensor, BlockTrace]]:
    opening_frames = 1 if session.config.opening else 0
    total = len(make_plan([session.config.shots], backbone.spec, opening_frames).blocks)
    for number in range(1, total + 1):
        made: GeneratedBlock = session.step()
        shown = made.pixels[0].permute(0, 2, 3, 1).float().cpu()
        on_block(number, total, shown)
        yield shown, BlockTrace.of(made)


def _write_opening(folder: Path, image: Tensor) -> Path:
    if image.shape[0] != 1:
        limit = "a video begins from one picture"
        raise refuse("start_image", f"{image.shape[0]} pictures", limit, "pick one with ImageFromBatch")
    path = folder / "opening.png"
    write_png(path, (image[0, ..., :3].clamp(0, 1) * 255).round().byte().cpu().numpy())
    return path


def show_bank(made: Generated, block: int) -> tuple[Tensor, str]:
    """Return a sheet 1 Y X 3 of what was in the bank before a block, each patch with its second, and a line on it."""
    if block > len(made.trace):
        limit = f"the video has {len(made.trace)} blocks"
        raise refuse("block", block, limit, "choose a smaller one, or -1 for the end")
    until = len(made.trace) if block < 0 else block
    new = {position: score for position, score in bank_before(made.trace, until).items() if score > 0}
    last = {frame: shown[-1] for frame, shown in pictures_of_frames(made.trace).items()}
    pixels, side = (made.pictures * 255).round().byte().numpy(), made.spec.token_pixels
    cut = {position: cut_out(pixels[last[position[0]]], position, side) for position in new}
    seconds = {frame: picture / made.spec.pictures_per_second for frame, picture in last.items()}
    bank = gather_patches(cut, new, seconds, side)
    sheet = torch.from_numpy(contact_sheet(bank)).float() / 255
    return sheet[None], describe_bank(bank, made.spec.grid)
