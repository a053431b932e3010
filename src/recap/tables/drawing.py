"""A batch of runs drawn at once and kept as plain pictures; one of them scored, on another core meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recap.contracts import Backbone
from recap.errors import refuse
from recap.eval.embedders import Looked
from recap.eval.sampling import Drawn, Pictures
from recap.eval.scores import Score
from recap.eval.witnesses import Embedder
from recap.fast.accelerate import choose_aside
from recap.plan import make_plan
from recap.rollout import rollout
from recap.run import build_memory
from recap.tables.draws import Draw
from recap.tables.looks import Look, look_at
from recap.tables.scoring import Seen, score
from recap.tables.scripts import Script
from recap.tables.worker import die_with_parent
from recap.trace import BlockTrace
from recap.types import GeneratedBlock


class Task(NamedTuple):
    """A drawn run to be scored; its pictures are in a file, since a pipe would copy every one of them twice."""

    pictures: Path  # .npy, N Y X 3
    fps: float
    trace: list[BlockTrace]
    data: dict[str, Any]  # a job's, with the measures of all
    script: Script | None  # where a page will show the run
    vectors: Path | None = None  # .npy, N D, where pictures were embedded as they were drawn
    backend: str = ""  # by whom


class Scored(NamedTuple):
    scores: dict[str, list[Score]]  # by measure
    look: Look | None
    seconds: float


def draw_batch(
    batch: Sequence[Draw], backbone: Backbone, place: Path, embedder: Embedder | None = None
) -> list[Task]:
    """Draw runs of one kind as rows of one rollout; pictures, and what `embedder` sees in them, go to `place`."""
    config, spec = batch[0].config, backbone.spec
    plan = make_plan([draw.config.shots for draw in batch], spec)
    shape = (spec.num_pictures(plan.blocks[-1].end_frame), *spec.picture_size, 3)
    files = [place / f"{draw.key}.npy" for draw in batch]
    kept = [np.lib.format.open_memmap(file, "w+", np.uint8, shape) for file in files]
    traces: list[list[BlockTrace]] = [[] for _ in batch]
    vectors: list[NDArray[np.float32]] = []
    offered = any(draw.config.trace_offered for draw in batch)
    blocks = rollout(
        backbone,
        build_memory(config, spec, lambda _: None),
        plan,
        seeds=[draw.config.seeds[0] for draw in batch],
        aside=choose_aside(config.device),
    )
    done = 0
    for made in blocks:
        pictures = _as_pictures(made)
        record = BlockTrace.of(made, offered=offered)
        for row, (shown, trace) in enumerate(zip(kept, traces, strict=True)):
            shown[done : done + pictures.shape[1]] = pictures[row]
            trace.append(record.row(row))
        if embedder is not None:
            seen = embedder.embed(list(pictures.reshape(-1, *pictures.shape[2:])))
            vectors.append(seen.reshape(*pictures.shape[:2], -1))
        done += pictures.shape[1]
    tasks = [_task(d, f, spec.pictures_per_second, t) for d, f, t in zip(batch, files, traces, strict=True)]
    if embedder is None:
        return tasks
    told = np.concatenate(vectors, axis=1)
    for row, task in enumerate(tasks):
        file = task.pictures.with_suffix(".vectors.npy")
        np.save(file, told[row])
        tasks[row] = task._replace(vectors=file, backend=embedder.backend)
    return tasks


def score_drawn(task: Task) -> Scored:
    """The work of a scorer."""
    began = time.monotonic()
    pictures: Pictures = np.load(task.pictures, mmap_mode="r")
    clip = Drawn(pictures, task.fps)
    embedder = None
    if task.vectors is not None:
        embedder = Looked(task.backend, pictures, np.load(task.vectors))
    scores = score(Seen(task.data, clip, task.trace, embedder=embedder), task.data["measures"])
    look = None if task.script is None else look_at(clip, len(pictures), task.trace, task.script)
    return Scored(scores, look, time.monotonic() - began)


def prepare_scorer() -> None:
    """One thread each, and the drawing goes first: a GPU that waits is the dearer one."""
    die_with_parent()
    torch.set_num_threads(1)
    os.nice(10)


def _as_pictures(made: GeneratedBlock) -> NDArray[np.uint8]:
    """B T Y X 3, rounded as a clip's writer rounds them."""
    if not bool(torch.isfinite(made.latents).all()):
        remedy = "try --dtype float32 or other memory settings"
        raise refuse("latents", f"block {made.block.index}", "holds NaN or infinity", remedy)
    levels = made.pixels.clamp(0, 1).mul(255).round().to(torch.uint8)
    pictures: NDArray[np.uint8] = levels.permute(0, 1, 3, 4, 2).contiguous().cpu().numpy()
    return pictures


def _task(draw: Draw, file: Path, fps: float, trace: list[BlockTrace]) -> Task:
    data = dict(draw.wanted[0].job.data)
    # Scorers look at pictures, never at the model: one that only names a GPU would take a share of its memory.
    data |= {"measures": draw.measures, "config": {**data["config"], "device": "cpu"}}
    return Task(file, fps, trace, data, draw.script if draw.shown else None)
