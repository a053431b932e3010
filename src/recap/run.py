"""The only composition root: RunConfig -> parts -> rollout -> files.

A run is a folder. While it is under way `work/` holds one clip and one file of latents per block, and
`state.safetensors` all that later blocks depend on; each is there whole or not at all, the state last. So a
killed run continues from its last whole block and ends in the same latents, trace and state as an undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from recap import __version__
from recap.config import DTYPES, RunConfig, read_json
from recap.contracts import Admission, Backbone, Decoder, Flow, FlowEstimator, MemoryPolicy, State
from recap.errors import refuse
from recap.fast.accelerate import accelerate, accelerate_flow, choose_aside
from recap.flow import build_flow, resolve_flow
from recap.io.files import LOCK, alone_in, remove_strays, write_whole
from recap.io.opening import read_opening
from recap.io.video import ClipWriter, join_clips, open_clip
from recap.plan import Plan, make_plan
from recap.rollout import Resume, at_once, reach, rollout
from recap.trace import BlockTrace, append_line, read_lines, read_seconds
from recap.types import BackboneSpec, GeneratedBlock

Notice = Callable[[str], None]
LONG_WRITE_S = 0.3  # a state of a public model is a gigabyte, and redrawing a few blocks is cheaper
BUSY = ("--resume", "another process is working on this run", "wait for it, or end it first")
TOLD = "told.safetensors"
"""Latents of the pictures a run goes on from: kept, so that it can be resumed when their file is gone."""

Progress = Callable[[int, int, float], None]
"""Called with (blocks finished, blocks in all, pictures per second of the last one)."""


def each_once(notice: Notice) -> Notice:
    """A notice that gives every line once: parts that are built several times have the same to say."""
    shown: set[str] = set()

    def give(line: str) -> None:
        if line not in shown:
            shown.add(line)
            notice(line)

    return give


def build_backbone(config: RunConfig, notice: Notice = print) -> Backbone:
    """The run's backbone, ready to draw."""
    prompts = list(dict.fromkeys(shot.prompt for shot in config.shots))
    made: Backbone = config.backbone.settings.build(
        device=config.device, dtype=DTYPES[config.dtype], prompts=prompts, notice=notice
    )
    return made if config.eager else accelerate(made)


def build_memory(config: RunConfig, spec: BackboneSpec, notice: Notice = print) -> MemoryPolicy:
    """The run's memory, fresh; its admission and flow are made only if it wants them."""

    def admission() -> Admission:
        rule = config.admission.settings
        flow: FlowEstimator = _no_flow
        if getattr(rule, "needs_flow", True):  # else neither weights nor OpenCV need be there
            found = build_flow(config.flow, device=config.device, notice=notice)
            flow = found if config.eager else accelerate_flow(found)
        made: Admission = rule.build(spec, flow)
        return made

    policy: MemoryPolicy = config.memory.settings.build(spec, admission)
    return policy


def settle_flow(config: RunConfig, spec: BackboneSpec, notice: Notice = print) -> RunConfig:
    """The config with `auto` as what it means here, so that records, later runs and this one mean the same.

    A memory that never looks at flow keeps `auto`: nothing is fetched, and nothing said, for its sake.
    """

    class Wanted(Exception):
        pass

    def admission() -> Admission:
        raise Wanted

    if config.flow != "auto" or not getattr(config.admission.settings, "needs_flow", True):
        return config
    try:
        config.memory.settings.build(spec, admission)
    except Wanted:
        return replace(config, flow=resolve_flow(config.flow, notice))
    return config


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("an admission with needs_flow = False asked for flow")


def no_progress(done: int, total: int, rate: float) -> None:
    """The progress that shows nothing."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run on disk."""

    folder: Path
    videos: tuple[Path, ...]  # one per row
    num_blocks: int
    num_pictures: int


def generate(
    config: RunConfig, folder: Path, *, progress: Progress = no_progress, notice: Notice = print
) -> RunRecord:
    """Start a run in a new or empty folder and finish it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        limit = "already exists and is not empty"
        raise refuse("--out", str(folder), limit, "choose another folder, or continue it with --resume")
    run = _Run(config, folder, notice)  # everything that can be refused is refused before a file is made
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, *BUSY):
        if {path.name for path in folder.iterdir()} != {LOCK}:  # somebody was faster
            raise refuse("--out", str(folder), "another run began there just now", "choose another folder")
        if run.told is not None:
            write_whole(folder / TOLD, save({"latents": run.told.cpu().contiguous()}))
        about = {"config": run.config.to_dict(), "versions": versions()}
        write_whole(folder / "run.json", json.dumps(about, indent=2).encode())
        return run.finish(progress)


def resume(folder: Path, *, progress: Progress = no_progress, notice: Notice = print) -> RunRecord:
    """Continue a stopped run from its last whole block; a finished one is left as it is."""
    if not (folder / "run.json").is_file():
        raise refuse("--resume", str(folder), "holds no run.json", "name the folder of an earlier run")
    about = read_json(folder / "run.json")
    if not isinstance(about, dict) or "config" not in about:
        raise refuse("--resume", str(folder), "its run.json holds no config", "start the run anew")
    if about.get("versions") != versions():
        notice("resuming under other versions than the run began with: bits may differ from here on")
    run = _Run(RunConfig.from_dict(about["config"]), folder, notice)
    with alone_in(folder, *BUSY):
        return run.finish(progress)


def versions() -> dict[str, Any]:
    """What else than the config a run's bits depend on."""
    packages = ("torch", "numpy", "safetensors", "av", "opencv-python-headless")
    installed = {d.name: d.version for d in metadata.distributions() if d.name in packages}
    return {
        "recap": __version__,
        **{name: installed.get(name, "none") for name in packages},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


class _Run:
    """One run's parts and its folder."""

    def __init__(self, config: RunConfig, folder: Path, notice: Notice):
        self.config = config
        self.folder = folder
        self.backbone = build_backbone(config, notice)
        self.told = self._read_told(notice) if config.opening else None
        given = 0 if self.told is None else self.told.shape[1]
        self.plan: Plan = make_plan([config.shots] * len(config.seeds), self.backbone.spec, given)
        for prompts in dict.fromkeys(block.prompts for block in self.plan.blocks):
            # A prompt that cannot be read is refused before any file is made.
            self.backbone.condition(prompts)
        # Last, as it may fetch weights: a run that is refused has not waited for them.
        self.config = settle_flow(config, self.backbone.spec, notice)
        self.policy: MemoryPolicy = build_memory(self.config, self.backbone.spec, notice)
        self.decoder: Decoder = self.backbone.decoder()

    def _read_told(self, notice: Notice) -> Tensor:
        """The latents that are given, for every row."""
        path = self.folder / TOLD
        if path.is_file():
            return load_file(path, device=self.config.device)["latents"]
        pixels = read_opening(self.config.opening, self.backbone.spec, notice).to(self.config.device)
        return self.backbone.encode(pixels).repeat(len(self.config.seeds), 1, 1, 1, 1)

    def finish(self, progress: Progress) -> RunRecord:
        """Draw what is missing, then join the parts."""
        if not (self.folder / "summary.json").exists():
            start = self._restore()
            progress(start, len(self.plan.blocks), 0.0)
            self._draw(start, progress)
            self._join()
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        blocks = self.plan.blocks
        videos = tuple(self.folder / name for name in self._video_names())
        pictures = self.backbone.spec.num_pictures(blocks[-1].end_frame)
        return RunRecord(self.folder, videos, len(blocks), pictures)

    def _draw(self, start: int, progress: Progress) -> None:
        (self.folder / "work").mkdir(exist_ok=True)
        total = len(self.plan.blocks)
        recent = range(max(0, start - reach(self.backbone.spec)), start)
        blocks = rollout(
            self.backbone,
            self.policy,
            self.plan,
            seeds=self.config.seeds,
            decoder=self.decoder,
            resume=Resume(
                block=start,
                opening_latents=self.told,
                recent_latents=[self._load(block) for block in recent],
                first_latent=self._load(0)[:, :1] if start else None,
            ),
            recorder=self._record,
            aside=at_once if self.config.eager else choose_aside(self.config.device),
        )
        began = rested = time.perf_counter()
        for made in blocks:
            done = made.block.index + 1
            seconds = time.perf_counter() - began
            append_line(self.folder / "timing.jsonl", {"block": made.block.index, "seconds": seconds})
            due = done % self.config.checkpoint_every == 0 and time.perf_counter() >= rested
            if due or done == total:
                rested = self._checkpoint(done)
            ended = time.perf_counter()
            progress(done, total, made.pixels.shape[1] / (ended - began))
            began = ended

    def _record(self, made: GeneratedBlock) -> None:
        """Write a finished block's pictures, latents and trace."""
        index = made.block.index
        if not bool(torch.isfinite(made.latents).all()):
            remedy = "try --dtype float32 or other memory settings"
            raise refuse("latents", f"block {index}", "holds NaN or infinity", remedy)
        spec = self.backbone.spec
        for row, pixels in enumerate(made.pixels):
            with ClipWriter(self._part(row, index), spec.picture_size, spec.pictures_per_second) as clip:
                clip.write(pixels)
        latents = made.latents.detach().cpu().contiguous()
        write_whole(self._latents(index), save({"latents": latents}))
        line = BlockTrace.of(made, offered=self.config.trace_offered)
        append_line(self.folder / "trace.jsonl", line.to_json())

    def _checkpoint(self, done: int) -> float:
        """Write the state; returns when the next one may be: large ones take a tenth of the time at most."""
        began = time.perf_counter()
        state: State = {"next_block": torch.tensor(done), "config": self._fingerprint()}
        state |= {f"policy.{name}": value for name, value in self.policy.state().items()}
        state |= {f"decoder.{name}": value for name, value in self.decoder.state().items()}
        plain = {name: value.cpu().contiguous() for name, value in state.items()}
        write_whole(self.folder / "state.safetensors", save(plain))
        ended = time.perf_counter()
        took = ended - began
        return ended + (9 * took if took > LONG_WRITE_S else 0.0)

    def _restore(self) -> int:
        """Load the last state; drop what was written after it. Returns the next block."""
        remove_strays(self.folder)
        path, start = self.folder / "state.safetensors", 0
        if path.exists():
            try:
                state = load_file(path, device=self.config.device)
                start = int(state["next_block"])
                same = torch.equal(state["config"].cpu(), self._fingerprint())
                for prefix, part in (("policy.", self.policy), ("decoder.", self.decoder)):
                    own = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
                    part.load_state(own)
            except (SafetensorError, KeyError) as error:
                raise refuse("state", str(path), f"cannot be read ({error})", "start the run anew") from error
            if not same:
                limit = "was written under other settings than run.json's"
                raise refuse("state", str(path), limit, "put run.json back or start the run anew")
        self._check_parts(start)
        for name in ("trace.jsonl", "timing.jsonl"):
            lines = read_lines(self.folder / name)[:start]
            if [line.get("block") for line in lines] != list(range(start)):
                limit = f"does not list the {start} blocks drawn so far"
                raise refuse("file", str(self.folder / name), limit, "put it back or start the run anew")
            write_whole(self.folder / name, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return start

    def _check_parts(self, start: int) -> None:
        """Before hours of drawing: is everything there that the end will join?"""
        for block in range(start):
            try:
                load_file(self._latents(block))
            except (OSError, SafetensorError) as error:
                remedy = "put it back or start the run anew"
                raise refuse("file", str(self._latents(block)), "is missing or damaged", remedy) from error
            for row in range(len(self.config.seeds)):
                open_clip(self._part(row, block))

    def _fingerprint(self) -> Tensor:
        """A digest of the config, by which a state knows the run it belongs to."""
        digest = hashlib.sha256(json.dumps(self.config.to_dict(), sort_keys=True).encode()).digest()
        return torch.tensor(list(digest), dtype=torch.uint8)

    def _join(self) -> None:
        blocks = range(len(self.plan.blocks))
        for row, name in enumerate(self._video_names()):
            join_clips([self._part(row, index) for index in blocks], self.folder / name)
        latents = [load_file(self._latents(index))["latents"] for index in blocks]
        write_whole(self.folder / "latents.safetensors", save({"latents": torch.cat(latents, dim=1)}))
        seconds = sum(read_seconds(self.folder / "timing.jsonl"))
        summary = {"blocks": len(blocks), "seconds": seconds, "videos": self._video_names()}
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2).encode())

    def _video_names(self) -> list[str]:
        rows = len(self.config.seeds)
        return ["video.mp4"] if rows == 1 else [f"video-{row}.mp4" for row in range(rows)]

    def _part(self, row: int, block: int) -> Path:
        return self.folder / "work" / f"row{row}-{block:06d}.mp4"

    def _load(self, block: int) -> Tensor:
        return load_file(self._latents(block), device=self.config.device)["latents"]

    def _latents(self, block: int) -> Path:
        return self.folder / "work" / f"{block:06d}.safetensors"
