"""`recap inspect` shows what novelty notices in any clip, without a generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.admission.flow import FlowNoveltyConfig
from recap.cli.console import progress_bar
from recap.cli.options import Device
from recap.config import check_device, from_settings, override, resolve_device
from recap.errors import refuse
from recap.flow import build_flow
from recap.flow.world import PICTURE_SIZE, refuse_world
from recap.io.video import open_clip
from recap.show.inspection import clip_title, inspect_clip


def inspect_command(
    clip: Annotated[Path, typer.Argument(help="Any video file.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the result [default: inspections/<clip>, of a run inspections/<run>-video]."
        ),
    ] = None,
    flow: Annotated[str, typer.Option(help="Optical flow; see `recap list flows`.")] = "auto",
    capacity_frames: Annotated[float, typer.Option(help="Bank capacity in frames' worth of tokens.")] = 1.0,
    size: Annotated[str | None, typer.Option(help="Rescale every picture, e.g. 832x480.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A novelty setting, e.g. cycle_threshold_px=1; repeatable."),
    ] = None,
    device: Device = None,
) -> None:
    """See what a memory would keep of any clip.

    An overlay video, scores, the bank's patches and one page to look at them are written to a folder.
    """
    config = from_settings(FlowNoveltyConfig, override({}, settings or [], parts=()), "novelty")
    pixels = _size(size)
    chosen = resolve_device("auto" if device is None else device)
    check_device(chosen, "float32")
    # What is not a video is refused before weights are looked for.
    found = open_clip(clip)
    rows, columns = pixels or (found.height, found.width)
    if flow == "world-flow" and (rows, columns) != PICTURE_SIZE:
        raise refuse_world(f"{columns}x{rows}")
    with progress_bar("noticing", "pictures") as reporter:
        page = inspect_clip(
            clip,
            out or Path("inspections") / Path(clip_title(clip)).with_suffix("").as_posix().replace("/", "-"),
            flow=build_flow(flow, device=chosen, notice=reporter.notice),
            config=config,
            capacity_frames=capacity_frames,
            size=pixels,
            device=chosen,
            reporter=reporter,
        )
    typer.echo(page)


def _size(text: str | None) -> tuple[int, int] | None:
    """Read WIDTHxHEIGHT as (rows, columns)."""
    if text is None:
        return None
    width, cross, height = text.partition("x")
    if not (cross and width.isdigit() and height.isdigit()):
        raise refuse("--size", text, "must read WIDTHxHEIGHT", "for example 832x480")
    return int(height), int(width)
