"""The page of one run: its video, what its bank kept and when, shares of attention, settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from recap.config import RunConfig, read_json
from recap.errors import refuse
from recap.io.files import write_whole
from recap.io.run_folder import OPENING
from recap.plan import make_plan
from recap.registry import JUDGES
from recap.run import read_record, read_spec
from recap.show.comparison import runs_page
from recap.show.measures import ColourJudge
from recap.trace import read_lines

PAGE = "index.html"


def write_run_page(folder: Path, *, trust_code: bool = False) -> Path:
    """Write `index.html` into the folder of a finished run; of a batch it shows the first row."""
    about = read_record(folder, trust_code=trust_code)
    if not (folder / "summary.json").is_file():
        limit = "the run is not finished"
        raise refuse("run", str(folder), limit, "finish it with `recap generate --resume`")
    config, spec = RunConfig.from_dict(about["config"]), read_spec(about)
    plan = make_plan([config.shots] * len(config.seeds), spec, _opening_frames(folder))
    video = folder / read_videos(folder)[0]
    _check_blocks(folder, len(plan.blocks))
    rows = f"; row 0 of {len(config.seeds)}" if len(config.seeds) > 1 else ""
    seconds = spec.num_pictures(plan.blocks[-1].end_frame) / spec.pictures_per_second
    subtitle = (
        f"{seconds:.1f} s by {spec.name} with the memory {config.memory.name}, seed {config.seeds[0]}{rows}"
    )
    judge = JUDGES.get(config.backbone.name, ColourJudge)()
    name = config.memory.name.rpartition(":")[2]
    page = runs_page(folder, {name: config}, {name: video}, plan, spec, judge, lambda: None, subtitle)
    write_whole(folder / PAGE, page.encode())
    return folder / PAGE


def read_videos(folder: Path) -> list[str]:
    """Read the names of a finished run's videos from its summary."""
    summary = folder / "summary.json"
    found = read_json(summary)
    videos = found.get("videos") if isinstance(found, Mapping) else None
    if (
        not isinstance(videos, list)
        or not videos
        or not all(isinstance(name, str) and name == Path(name).name for name in videos)
    ):
        raise refuse("file", str(summary), "names no videos", "put it back, or generate the run again")
    return videos


def _check_blocks(folder: Path, num_blocks: int) -> None:
    """Refuse files of a finished run that were cut short since."""
    for name, key in (("trace.jsonl", "block"), ("timing.jsonl", "seconds")):
        found = sum(key in line for line in read_lines(folder / name))
        if found != num_blocks:
            limit = f"it describes {found} of {num_blocks} blocks"
            raise refuse("file", str(folder / name), limit, "put it back, or generate the run again")


def _opening_frames(folder: Path) -> int:
    """Count the latent frames of the pictures that the run continues."""
    if not (folder / OPENING).is_file():
        return 0
    with safe_open(folder / OPENING, "pt") as file:
        return int(file.get_slice("latents").get_shape()[1])
