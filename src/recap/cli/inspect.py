"""`recap inspect`: see what novelty notices in any clip, without a generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recap.admission.flow import FlowNoveltyConfig
from recap.cli.console import progress_bar, show_notice
from recap.config import from_settings, override
from recap.errors import refuse
from recap.flow import build_flow
from recap.io.video import open_clip
from recap.show.inspection import inspect_clip


def inspect_command(
    clip: Annotated[Path, typer.Argument(help="Any video file.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result; default inspections/<clip>.")
    ] = None,
    flow: Annotated[str, typer.Option(help="Optical flow; see `recap list`.")] = "auto",
    capacity_frames: Annotated[float, typer.Option(help="Bank capacity in frames' worth of tokens.")] = 1.0,
    size: Annotated[str | None, typer.Option(help="Rescale every picture, e.g. 832x480.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A novelty setting, e.g. cycle_threshold_px=1; repeatable."),
    ] = None,
) -> None:
    """Write an overlay video, scores, the bank's patches and one page to look at them."""
    defaults: dict[str, Any] = {}
    config = from_settings(FlowNoveltyConfig, override(defaults, settings or []), "novelty")
    pixels = _size(size)
    open_clip(clip)  # what is no video is refused before weights are looked for
    with progress_bar("noticing", "pictures") as report:
        summary = inspect_clip(
            clip,
            out or Path("inspections") / clip.stem,
            flow=build_flow(flow, device="cpu", notice=show_notice),
            config=config,
            capacity_frames=capacity_frames,
            size=pixels,
            progress=report,
            notice=show_notice,
        )
    typer.echo(summary.page)


def _size(text: str | None) -> tuple[int, int] | None:
    """WxH as rows, columns."""
    if text is None:
        return None
    width, cross, height = text.partition("x")
    if not (cross and width.isdigit() and height.isdigit()):
        raise refuse("--size", text, "must read WIDTHxHEIGHT", "for example 832x480")
    return int(height), int(width)
