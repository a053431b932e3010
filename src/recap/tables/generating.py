"""This module turns jobs into scores: runs are generated as rows of one rollout and judged as plain pictures.

Pictures are judged as they were generated, never encoded, so a result does not depend on who generated it or on how
many runs were generated together (but for roundings; and a time is only taken of a run that was alone).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from recap.config import RunConfig
from recap.contracts import Backbone
from recap.errors import refuse
from recap.eval.embedders import Looked
from recap.eval.judged import JudgedRun
from recap.eval.judges.probe import Judged, Probe
from recap.eval.metrics import find_measure
from recap.eval.sampling import InMemoryClip, Pictures
from recap.eval.witnesses import Embedder
from recap.fast.accelerate import choose_aside
from recap.io import video
from recap.io.code import changed_code
from recap.io.trace import BlockTrace
from recap.plan import make_plan
from recap.rollout import rollout
from recap.run import build_backbone, build_memory
from recap.tables.executors import describe
from recap.tables.page import look_at, pack_look
from recap.tables.runner import FAILED, Job, Result, canonical
from recap.tables.runs import LOOK, entry_of, measure_of
from recap.types import GeneratedBlock

CLIP, VECTORS, JUDGED = "video.mp4", ".vectors.npy", ".judged.safetensors"


class Generated(NamedTuple):
    """Holds a run on its way to its judges; pictures are in a file, as a pipe would copy every one of them twice.

    `pictures` is a file of N Y X 3. Where pictures were embedded as they were generated, by `backend`, a file of N D
    lies next to it (`VECTORS`), and where the probe judged them, its answers (`JUDGED`). `seconds` are those of
    every block, empty for a row of several.
    """

    pictures: Path
    fps: float
    trace: list[BlockTrace]
    seconds: list[float]
    backend: str = ""


def generate_and_score(job: Job, folder: Path) -> Result:
    """Generate a run by itself and judge it: the work of one process."""
    _check_code(job)
    backbone = _backbone(replace(config_of(job), eager=needs_readable_path(job.wants)))
    with tempfile.TemporaryDirectory() as scratch:
        (made,) = generate_batch([job], backbone, Path(scratch))
        return score_generated(replace(job, options={**job.options, "generated": made}), folder)


def _check_code(job: Job) -> None:
    """Refuse to work for a process that read a file outside the package before it was edited."""
    changed = changed_code(job.data.get("code"), job.data["config"])
    changed += [measure_of(entry) for entry in job.wants - {LOOK} if entry != entry_of(measure_of(entry))]
    if changed:
        limit = "its file was edited after this command began"
        raise refuse("code", changed[0], limit, "give the same command again")


# The backbone of the last run of this process, by its settings.
_loaded: dict[str, Backbone] = {}


def _backbone(config: RunConfig) -> Backbone:
    values = config.to_dict()
    settings = canonical([values.get(name) for name in ("backbone", "device", "dtype", "precision", "eager")])
    if settings not in _loaded:
        _loaded.clear()
        _loaded[settings] = build_backbone(config, lambda _: None)
    return _loaded[settings]


def config_of(job: Job) -> RunConfig:
    """Return the config of the run of a job."""
    return RunConfig.from_dict(job.data["config"])


def needs_readable_path(wants: Iterable[str]) -> bool:
    """Tell whether a measure needs what the fast path of a GPU does not report."""
    return any(find_measure(measure_of(name)).reads_shares for name in wants if name != LOOK)


class _Fetched:
    """Brings a finished block to the host while the device generates the next one.

    Its pixels become bytes, B T Y X 3, rounded as a clip's writer rounds them: a quarter of the size.
    """

    def __init__(self, made: GeneratedBlock, probe: Probe | None):
        levels = made.pixels.clamp(0, 1).mul(255).round().to(torch.uint8)
        found = None if probe is None else probe.judge(levels.float() / 255)
        self.judged = None if found is None else Judged(*map(_to_host, found))
        self._made = _to_host(replace(made, pixels=levels.permute(0, 1, 3, 4, 2).contiguous()))
        self._copied = torch.cuda.Event() if levels.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> GeneratedBlock:
        if self._copied is not None:
            self._copied.synchronize()
        made: GeneratedBlock = self._made
        if not bool(torch.isfinite(made.latents).all()):
            remedy = "try --dtype float32 or other memory settings"
            raise refuse("latents", f"block {made.block.index}", "holds NaN or infinity", remedy)
        return made


def _to_host(value: Any) -> Any:
    """Return a value with its tensors on the host; those of a device are there once its queue has come so far."""
    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            return value
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _to_host(getattr(value, each.name)) for each in fields(value)})
    return {key: _to_host(each) for key, each in value.items()} if isinstance(value, dict) else value


def _fetch(blocks: Iterable[GeneratedBlock], probe: Probe | None, behind: int) -> Iterator[_Fetched]:
    """Yield blocks on their way to the host, each when `behind` more are queued: no device then waits."""
    queued: deque[_Fetched] = deque()
    for made in blocks:
        queued.append(_Fetched(made, probe))
        if len(queued) > behind:
            yield queued.popleft()
    yield from queued


def generate_batch(
    jobs: Sequence[Job],
    backbone: Backbone,
    folder: Path,
    embedder: Embedder | None = None,
    probe: Probe | None = None,
    on_block: Callable[[], None] = lambda: None,
) -> list[Generated]:
    """Generate runs that differ in prompts and seed alone; pictures, and what is made of them, go to files.

    `on_block` is called after every block.
    """
    configs, spec, alone = [config_of(job) for job in jobs], backbone.spec, len(jobs) == 1
    plan = make_plan([config.shots for config in configs], spec)
    shape = (spec.num_pictures(plan.blocks[-1].end_frame), *spec.picture_size, 3)
    files = [folder / f"{job.key}.npy" for job in jobs]
    maps = [np.lib.format.open_memmap(file, "w+", np.uint8, shape) for file in files]
    records: list[BlockTrace] = []
    offered = any(job.options.get("trace_offered") for job in jobs)
    vectors: list[NDArray[np.float32]] = []
    judged: list[Judged] = []
    blocks = rollout(
        backbone,
        build_memory(configs[0], spec, lambda _: None),
        plan,
        seeds=[config.seeds[0] for config in configs],
        aside=choose_aside(configs[0].device),
        sampling=configs[0].sampling,
    )
    seconds, began = [], time.perf_counter()
    with ThreadPoolExecutor(1) as writer:
        written = writer.submit(lambda: None)
        # A run that is alone is timed, block by block, and nothing runs next to it.
        for fetched in _fetch(blocks, probe, behind=0 if alone else 1):
            made = fetched.wait()
            judged += [fetched.judged] if fetched.judged is not None else []
            seconds.append(time.perf_counter() - began)
            records.append(BlockTrace.of(made, offered=offered))
            # Hundreds of megabytes are written while the next block is generated.
            written.result()
            written = writer.submit(_write_pictures, maps, records[-1].first_pictures[0], made.pixels.numpy())
            if embedder is not None:
                seen = embedder.embed(list(made.pixels.flatten(0, 1).numpy()))
                vectors.append(seen.reshape(*made.pixels.shape[:2], -1))
            if alone:
                written.result()
            on_block()
            began = time.perf_counter()
        written.result()
    _save_judgements(files, vectors, judged)
    fps, backend = spec.pictures_per_second, "" if embedder is None else embedder.backend
    return [
        Generated(file, fps, [record.row(row) for record in records], seconds if alone else [], backend)
        for row, file in enumerate(files)
    ]


def _write_pictures(maps: Sequence[NDArray[np.uint8]], first: int, pictures: NDArray[np.uint8]) -> None:
    for target, own in zip(maps, pictures, strict=True):
        target[first : first + len(own)] = own


def _save_judgements(
    files: Sequence[Path], vectors: Sequence[NDArray[np.float32]], judged: Sequence[Judged]
) -> None:
    """Save, next to the pictures of each row, what was made of them while they were generated."""
    if vectors:
        for file, own in zip(files, np.concatenate(vectors, axis=1), strict=True):
            np.save(file.with_suffix(VECTORS), own)
    if judged:
        whole = Judged(*(torch.cat(part, dim=1) for part in zip(*judged, strict=True)))
        for row, file in enumerate(files):
            parts = {name: part[row : row + 1].contiguous() for name, part in whole._asdict().items()}
            save_file(parts, file.with_suffix(JUDGED))


def score_generated(job: Job, folder: Path) -> Result:
    """Judge a generated run: the scores of every measure by their names, and a look for a page."""
    _check_code(job)
    data, made = job.data, job.options["generated"]
    if job.options.get("judged_on_cpu"):
        # A judge that only names a GPU would take a share of its memory.
        data = {**data, "config": {**data["config"], "device": "cpu"}}
    pictures: Pictures = np.load(made.pictures, mmap_mode="r")
    clip = InMemoryClip(pictures, made.fps)
    embedder = None
    if made.backend:
        embedder = Looked(made.backend, pictures, np.load(made.pictures.with_suffix(VECTORS)))
    judged_file = made.pictures.with_suffix(JUDGED)
    judged = Judged(**load_file(judged_file)) if judged_file.is_file() else None
    run = JudgedRun(data, clip, made.trace, made.seconds, embedder, judged)
    result: Result = {}
    for entry in sorted(job.wants - {LOOK}):
        name = measure_of(entry)
        try:
            result[entry] = {score.name: score.as_dict() for score in find_measure(name).scores(run)}
        except Exception as error:
            # Of the package's own the whole run is tried again: it may have failed for want of memory.
            if ":" not in name:
                raise
            result.setdefault(FAILED, {})[name] = describe(error)
    if LOOK in job.wants:
        shots_s = [shot["seconds"] for shot in data["config"]["shots"]]
        result[LOOK] = pack_look(look_at(clip, made.trace, shots_s))
        if video.can_encode():
            path = folder / CLIP
            path.parent.mkdir(parents=True, exist_ok=True)
            with video.ClipWriter(path, pictures.shape[1:3], clip.fps) as writer:
                for picture in clip.pictures():
                    writer.write(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])
    # JSON has no nan: a share of no pictures is None.
    plain: Result = json.loads(json.dumps(result), parse_constant=lambda _: None)
    return plain
