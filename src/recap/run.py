"""The only place where a config becomes parts, a rollout and files.

A run is a folder. While a run is under way `work/` holds one clip and one file of latents per block, and
`state.safetensors` all that later blocks depend on; each file is whole or absent, and the state is written last.
So a killed run resumes from its last whole block and ends in the same latents, trace and state as an undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from recap.config import DTYPES, RunConfig, from_settings, read_json
from recap.contracts import Admission, Backbone, Decoder, Flow, FlowEstimator, MemoryPolicy, State
from recap.errors import refuse
from recap.fast.accelerate import accelerate, accelerate_flow, choose_aside
from recap.flow import build_flow, resolve_flow
from recap.io.files import LOCK, alone_in, remove_strays, write_whole
from recap.io.opening import read_opening
from recap.io.report import SILENT, Notice, Progress, Reporter
from recap.io.video import ClipWriter, join_clips, open_clip
from recap.plan import Plan, make_plan
from recap.rollout import Resume, at_once, reach, rollout
from recap.trace import BlockTrace, append_line, read_lines, read_seconds
from recap.types import BackboneSpec, GeneratedBlock

VERSION = "0.1.0"
# The state of a public model is a gigabyte: generating a few blocks again is cheaper than writing it often.
LONG_WRITE_S = 0.3
BUSY = ("--resume", "another process is working on this run", "wait for it, or end it first")
OPENING = "opening.safetensors"
"""Latents of the pictures that a run continues: kept, so that it can be resumed when their file is gone."""

# Characters of the prompt in a folder's name.
LONGEST_NAME = 48


def build_backbone(config: RunConfig, notice: Notice = print) -> Backbone:
    """Load the run's backbone, ready to generate."""
    prompts = list(dict.fromkeys(shot.prompt for shot in config.shots))
    made: Backbone = config.backbone.settings.build(
        device=config.device, dtype=DTYPES[config.dtype], prompts=prompts, notice=notice
    )
    return made if config.eager else accelerate(made)


def build_memory(config: RunConfig, spec: BackboneSpec, notice: Notice = print) -> MemoryPolicy:
    """Make the run's memory, empty; its admission and flow are made only if it asks for them."""

    def admission() -> Admission:
        rule = config.admission.settings
        flow: FlowEstimator = _no_flow
        if rule.needs_flow:  # else neither weights nor OpenCV need be there
            found = build_flow(config.flow, device=config.device, notice=notice)
            flow = found if config.eager else accelerate_flow(found)
        made: Admission = rule.build(spec, flow)
        return made

    policy: MemoryPolicy = config.memory.settings.build(spec, admission)
    return policy


def settle_flow(config: RunConfig, spec: BackboneSpec, notice: Notice = print) -> RunConfig:
    """Replace the flow `auto` by what it means here, so that records, later runs and this one agree.

    A memory that never looks at flow keeps `auto`: nothing is fetched for it, and no notice is shown.
    """

    class Wanted(Exception):
        pass

    def admission() -> Admission:
        raise Wanted

    if config.flow != "auto" or not config.admission.settings.needs_flow:
        return config
    try:
        config.memory.settings.build(spec, admission)
    except Wanted:
        return replace(config, flow=resolve_flow(config.flow, notice))
    return config


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("an admission with needs_flow = False asked for flow")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run on disk."""

    folder: Path
    # One per row of the batch.
    videos: tuple[Path, ...]
    num_blocks: int
    num_pictures: int


def generate(config: RunConfig, folder: Path, *, reporter: Reporter = Reporter()) -> RunRecord:
    """Start a run in a new or empty folder and finish it; progress counts blocks, at pictures per second."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        limit = "already exists and is not empty"
        raise refuse("--out", str(folder), limit, "choose another folder, or continue it with --resume")
    # Everything that can be refused is refused before a file is made.
    run = _Run(config, folder, reporter.notice)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, *BUSY):
        if {path.name for path in folder.iterdir()} != {LOCK}:
            raise refuse("--out", str(folder), "another run began there just now", "choose another folder")
        if run.opening_latents is not None:
            write_whole(folder / OPENING, save({"latents": run.opening_latents.cpu().contiguous()}))
        spec = asdict(run.backbone.spec)
        about = {"config": run.config.to_dict(), "versions": versions(), "spec": spec}
        write_whole(folder / "run.json", json.dumps(about, indent=2).encode())
        return run.finish(reporter.progress)


def resume(folder: Path, *, reporter: Reporter = Reporter()) -> RunRecord:
    """Continue a stopped run from its last whole block; a finished one is left as it is."""
    about = read_record(folder, "--resume")
    if about.get("versions") != versions():
        reporter.notice("resuming under other versions than the run began with: bits may differ from here on")
    run = _Run(RunConfig.from_dict(about["config"]), folder, reporter.notice)
    with alone_in(folder, *BUSY):
        return run.finish(reporter.progress)


def read_record(folder: Path, field: str = "run") -> dict[str, Any]:
    """Read the run.json of a run: its `config`, `versions` and, since there is one, the `spec` of its backbone."""
    if not (folder / "run.json").is_file():
        raise refuse(field, str(folder), "holds no run.json", "name the folder of an earlier run")
    about = read_json(folder / "run.json")
    if not isinstance(about, dict) or "config" not in about:
        raise refuse(field, str(folder), "its run.json holds no config", "start the run again")
    return about


def read_spec(about: dict[str, Any]) -> BackboneSpec:
    """Read the spec that a run recorded; the record of an older version has none, and its backbone is loaded."""
    if "spec" not in about:
        return build_backbone(RunConfig.from_dict(about["config"]), SILENT.notice).spec
    spec: BackboneSpec = from_settings(BackboneSpec, about["spec"], "spec")
    return spec


def new_folder(config: RunConfig, what: str = "") -> Path:
    """Name a folder of `runs` after the time, the first prompt and the memory, or `what` else the run is."""
    words = re.sub(r"\W+", "-", config.shots[0].prompt.lower()).strip("-")
    if len(words) > LONGEST_NAME:
        words = words[:LONGEST_NAME].rpartition("-")[0] or words[:LONGEST_NAME]
    kind = what or re.sub(r"\W+", "-", config.memory.name.rpartition(":")[2])
    name = "-".join(part for part in (time.strftime("%Y%m%d-%H%M%S"), words, kind) if part)
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def versions() -> dict[str, Any]:
    """List what else than the config a run's bits depend on."""
    packages = ("torch", "numpy", "safetensors", "av", "opencv-python-headless")
    installed = {d.name: d.version for d in metadata.distributions() if d.name in packages}
    return {
        "recap": VERSION,
        **{name: installed.get(name, "none") for name in packages},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


class _Run:
    """The parts and the folder of one run."""

    def __init__(self, config: RunConfig, folder: Path, notice: Notice):
        self.folder = folder
        self.backbone = build_backbone(config, notice)
        self.opening_latents = self._read_opening(config, notice) if config.opening else None
        given = 0 if self.opening_latents is None else self.opening_latents.shape[1]
        self.plan: Plan = make_plan([config.shots] * len(config.seeds), self.backbone.spec, given)
        for prompts in dict.fromkeys(block.prompts for block in self.plan.blocks):
            # A prompt that cannot be read is refused before any file is made.
            self.backbone.condition(prompts)
        # Last, as it may fetch weights: a run that is refused has not waited for them.
        self.config = settle_flow(config, self.backbone.spec, notice)
        self.policy: MemoryPolicy = build_memory(self.config, self.backbone.spec, notice)
        self.decoder: Decoder = self.backbone.decoder()

    def _read_opening(self, config: RunConfig, notice: Notice) -> Tensor:
        """Read the latents that the video continues, the same for every row."""
        path = self.folder / OPENING
        if path.is_file():
            return load_file(path, device=config.device)["latents"]
        pixels = read_opening(config.opening, self.backbone.spec, notice).to(config.device)
        return self.backbone.encode(pixels).repeat(len(config.seeds), 1, 1, 1, 1)

    def finish(self, progress: Progress) -> RunRecord:
        """Generate what is missing, then join the parts."""
        if not (self.folder / "summary.json").exists():
            start = self._restore()
            progress(start, len(self.plan.blocks), 0.0)
            self._generate(start, progress)
            self._join()
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        blocks = self.plan.blocks
        videos = tuple(self.folder / name for name in self._video_names())
        pictures = self.backbone.spec.num_pictures(blocks[-1].end_frame)
        return RunRecord(self.folder, videos, len(blocks), pictures)

    def _generate(self, start: int, progress: Progress) -> None:
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
                opening_latents=self.opening_latents,
                recent_latents=[self._load(block) for block in recent],
                first_latent=self._load(0)[:, :1] if start else None,
            ),
            recorder=self._record,
            aside=at_once if self.config.eager else choose_aside(self.config.device),
        )
        started = began = rested = time.perf_counter()
        pictures = 0
        for made in blocks:
            done = made.block.index + 1
            seconds = time.perf_counter() - began
            append_line(self.folder / "timing.jsonl", {"block": made.block.index, "seconds": seconds})
            due = done % self.config.checkpoint_every == 0 and time.perf_counter() >= rested
            if due or done == total:
                rested = self._checkpoint(done)
            began = time.perf_counter()
            pictures += made.pixels.shape[1]
            progress(done, total, pictures / (began - started))

    def _record(self, made: GeneratedBlock) -> None:
        """Write the pictures, latents and trace of a finished block."""
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
        """Write the state; returns the time from which the next may be written.

        Large states take a tenth of the time at most.
        """
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
                raise refuse(
                    "state", str(path), f"cannot be read ({error})", "start the run again"
                ) from error
            if not same:
                limit = "was written under other settings than run.json's"
                raise refuse("state", str(path), limit, "put run.json back or start the run again")
        self._check_parts(start)
        for name in ("trace.jsonl", "timing.jsonl"):
            lines = read_lines(self.folder / name)[:start]
            if [line.get("block") for line in lines] != list(range(start)):
                limit = f"does not list the {start} blocks generated so far"
                raise refuse("file", str(self.folder / name), limit, "put it back or start the run again")
            write_whole(self.folder / name, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return start

    def _check_parts(self, start: int) -> None:
        """Check, before hours of work, that everything is there that the end will join."""
        for block in range(start):
            try:
                load_file(self._latents(block))
            except (OSError, SafetensorError) as error:
                remedy = "put it back or start the run again"
                raise refuse("file", str(self._latents(block)), "is missing or damaged", remedy) from error
            for row in range(len(self.config.seeds)):
                open_clip(self._part(row, block))

    def _fingerprint(self) -> Tensor:
        """Compute a digest of the config, by which a state knows the run it belongs to."""
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
