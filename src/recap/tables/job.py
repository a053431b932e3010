"""One job of a reproduction: draw a run, or go on with it, and score its files.

The result depends on the job's data alone: which judges look at the video is part of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recap.config import RunConfig
from recap.eval.motion_judge import USUAL
from recap.io.files import LOCK, remove_strays
from recap.io.video import open_clip
from recap.run import generate, resume
from recap.tables.jobs import Job, Result
from recap.tables.recipes import Planned, Recipe
from recap.tables.scoring import OF_MOTION, Seen, as_result, score
from recap.trace import read_seconds, read_trace


def job_of(
    planned: Planned, recipe: Recipe, embedder: str, detector: str = "", judge_flow: str = USUAL
) -> Job:
    data: dict[str, Any] = {
        "config": planned.config.to_dict(),
        "measures": list(recipe.measures),
        "subject": planned.script.subject,
        "embedder": embedder,
        "detector": detector,
    }
    if planned.script.late_subject:
        data["late_subject"] = (
            planned.script.late_subject
        )  # not named where there is none: those jobs stay done
    if judge_flow != USUAL and OF_MOTION & set(recipe.measures):
        # The usual one is not named, so that jobs which were done before there was a choice stay done.
        data["judge_flow"] = judge_flow
    return Job(planned.row.name, planned.script.name, planned.seed, data)


def draw_and_score(payload: dict[str, Any], folder: str) -> Result:
    """The work of a sweep: the scores of one run, by name."""
    data, place = payload["data"], Path(folder)
    draw_run(RunConfig.from_dict(data["config"]), place)
    trace, seconds = read_trace(place / "trace.jsonl"), read_seconds(place / "timing.jsonl")
    seen = Seen(data, open_clip(place / "video.mp4"), trace, seconds)
    return as_result(score(seen, data["measures"]), data["measures"])


def draw_run(config: RunConfig, folder: Path) -> None:
    """Draw a run, or go on with one that was stopped."""
    if (folder / "run.json").is_file():
        resume(folder, notice=lambda _: None)
    else:
        if folder.is_dir():  # stopped before it was a run
            remove_strays(folder)
            (folder / LOCK).unlink(missing_ok=True)
        generate(config, folder, notice=lambda _: None)
    # Only a run that goes on needs its state, and a sweep has hundreds of them.
    (folder / "state.safetensors").unlink(missing_ok=True)
