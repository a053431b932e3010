"""This module verifies a model whose weights are installed: files, loading, a first block, and minutes of video.

Files are hashed and compared with those that the tables of this package were written for. The first frames under a
fixed seed are checked: finite, neither grey nor noise, and something moves. Then a few prompts are generated with
several memories, and everything that can be counted without a judge of its own is counted: times, memory in use,
how the contrast, the colours and the motion change. The result is plain data; `verification_page` makes a page of it.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recap.backbones.helios.family import HeliosConfig
from recap.backbones.tiny.backbone import WEIGHTS, EmbeddedConfig
from recap.backbones.wan.family import WanConfig
from recap.backbones.wan.published import SETS
from recap.config import choose
from recap.contracts import BackboneConfig
from recap.errors import refuse
from recap.fast.speed import Parts, measure
from recap.io.files import sha256_of
from recap.io.record import versions
from recap.io.report import Reporter
from recap.io.video import ClipWriter, Picture
from recap.plan import Shot, check_amount, check_shots, make_plan
from recap.rollout import rollout
from recap.show.models import ModelChoice
from recap.show.run_page import contrast, histogram_cosine
from recap.types import BackboneSpec, GeneratedBlock, Role

# Version of the layout of the result.
VERSION = 1
PROMPTS = ("a fox on a beach by day", "a bus in a city at night", "a boat on the sea at sunset")
"""Every model reads these; the embedded one knows no other kind of sentence."""
MOST_PROMPTS = 20
OPENING_FRAMES = 3
"""A block, or as many blocks of one frame: fewer show no motion."""
SHOWN = 5
"""Moments of a video that the page shows, first and last among them."""
SHOWN_PX = 208
LEAST = {"contrast": 0.02, "motion": 0.001, "smoothness": 0.5}
"""What the pictures of a model that has learnt something exceed: standard deviation of luma; mean change from one
picture to the next, both of 1; correlation of neighbouring pixels, which is 0 for noise."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """Sets how much is generated."""

    prompts: tuple[str, ...] = PROMPTS
    memories: tuple[str, ...] = ("none", "sink", "recap")
    seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_amount("number of prompts", len(self.prompts), MOST_PROMPTS, "prompts", "verify fewer")
        if not self.prompts:
            raise refuse("--prompt", None, "at least 1 is needed", "leave it out for the three usual ones")
        check_shots([Shot(prompt, self.seconds) for prompt in self.prompts])
        for name in self.memories:
            choose("memory", name)
        if len(set(self.memories)) < len(self.memories) or not self.memories:
            raise refuse("--memories", ",".join(self.memories), "list each once", "for example none,sink")

    def num_blocks(self, spec: BackboneSpec) -> int:
        """Return the blocks of one video, at least two, which have a time between them."""
        return max(2, round(self.seconds / spec.block_s))


def check_files(config: BackboneConfig, reporter: Reporter) -> list[dict[str, Any]]:
    """Hash the files that a model is loaded from, and compare the hashes with known ones; a model may have none."""
    if isinstance(config, WanConfig):
        files = config.all_files()
    elif isinstance(config, HeliosConfig):
        files = sorted(file for file in config.check_files().rglob("*") if file.is_file())
    else:
        names = ("dit", "autoencoder", "text") if isinstance(config, EmbeddedConfig) else ()
        files = [WEIGHTS / f"{name}.safetensors" for name in names]
    public = [file for each in SETS.values() for file in each.files if file.sha256]
    by_hash, by_path = {file.sha256: file for file in public}, {file.path: file for file in public}
    advance = reporter.counter(sum(file.stat().st_size for file in files))
    found = []
    for file in files:
        digest = sha256_of(file, advance)
        verdict = "no hash of it is known"
        if digest in by_hash:
            known = by_hash[digest]
            verdict = f"as published: {known.repository}/{known.name}"
        elif file in by_path:
            verdict = f"NOT the published file, whose hash is {by_path[file].sha256}"
        elif isinstance(config, EmbeddedConfig):
            verdict = "the package's own"
        found.append({"file": file.name, "bytes": file.stat().st_size, "sha256": digest, "verdict": verdict})
    return found


class Watcher:
    """Looks at the pictures of a video as they are generated, and keeps a few of them."""

    def __init__(self, num_blocks: int, write: Callable[[Tensor], None], advance: Callable[[int], None]):
        self._shown = spread(num_blocks)
        self._write = write
        self._advance = advance
        self._last: Tensor | None = None
        self._opening: Picture | None = None
        self.finite = True
        self.pictures: list[Picture] = []
        # One value per block.
        self.contrast: list[float] = []
        self.likeness: list[float] = []
        self.motion: list[float] = []
        self.sink_share: list[float] = []
        self.bank = 0

    def __call__(self, block: GeneratedBlock, pictures: Tensor) -> None:
        """Look at one block and its pictures, 1 T 3 Y X, uint8."""
        self.finite &= bool(block.latents.isfinite().all() & block.pixels.isfinite().all())
        shown = pictures[0].float() / 255
        self.motion.append(motion_of(shown if self._last is None else torch.cat([self._last, shown])))
        self._last = shown[-1:].clone()
        host = pictures[0].cpu()
        last: Picture = host[-1].permute(1, 2, 0).numpy()
        self._opening = last if self._opening is None else self._opening
        self.contrast.append(contrast(last))
        self.likeness.append(histogram_cosine(self._opening, last))
        if Role.SINK in block.shares:
            self.sink_share.append(float(block.shares[Role.SINK].mean()))
        self.bank = block.memory.tokens.get(Role.BANK, 0)
        self.pictures += [shrunk(shown[-1])] * self._shown.count(block.block.index)
        self._write(host)
        self._advance(len(host))

    def summary(self) -> dict[str, Any]:
        """Return what was seen, as plain data."""
        moving = [value for value in self.motion if not math.isnan(value)]
        return {
            "finite": self.finite,
            "contrast": {"first": self.contrast[0], "last": self.contrast[-1]},
            "colours_like_the_opening": self.likeness[-1],
            "motion": statistics.mean(moving) if moving else 0.0,
            "sink_share": statistics.mean(self.sink_share) if self.sink_share else None,
            "bank_tokens": self.bank,
        }


def spread(count: int) -> list[int]:
    """Return which of `count` things in a row the page shows, from the first to the last; of few, some twice."""
    return [round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)]


def motion_of(pictures: Tensor) -> float:
    """Return the mean change from one picture T 3 Y X, 0..1, to the next; nan for fewer than two."""
    return float((pictures[1:] - pictures[:-1]).abs().mean())


def smoothness_of(picture: Tensor) -> float:
    """Return the correlation of horizontal neighbours in a picture 3 Y X: near 1 in a photograph, 0 in noise."""
    luma = picture.float().mean(dim=0)
    pairs = torch.stack([luma[:, :-1].flatten(), luma[:, 1:].flatten()])
    return float(torch.corrcoef(pairs)[0, 1].nan_to_num())


def shrunk(picture: Tensor) -> Picture:
    """Return a picture 3 Y X in 0..1 as bytes Y X 3, no wider than a page needs."""
    height, width = picture.shape[1:]
    factor = min(1.0, SHOWN_PX / width)
    size = (round(height * factor), round(width * factor))
    small = functional.interpolate(picture[None].cpu(), size=size, mode="area")[0]
    made: Picture = (small.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    return np.ascontiguousarray(made)


def check_opening(parts: Parts, choice: ModelChoice, settings: VerifySettings) -> dict[str, Any]:
    """Generate the first frames under the seed, with a plain sink, and check them.

    What only a model that has learnt something can pass is not judged where the weights are random.
    """
    spec = parts.backbone.spec
    count = -(-OPENING_FRAMES // spec.frames_per_block)
    plan = make_plan([[Shot(settings.prompts[0], count * spec.block_s)]], spec)
    policy = parts.policy(choice.speed("sink", 2))
    blocks = list(rollout(parts.backbone, policy, plan, seeds=[settings.seed]))
    latents = torch.cat([block.latents for block in blocks], dim=1).float().cpu()
    pixels = torch.cat([block.pixels for block in blocks], dim=1)[0].float().cpu()
    finite = bool(latents.isfinite().all() and pixels.isfinite().all())
    shown = pixels.nan_to_num().clamp(0, 1)
    values = {
        "contrast": contrast((shown[-1].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()),
        "motion": motion_of(shown),
        "smoothness": smoothness_of(shown[-1]),
    }
    learnt = parts.about["weights"] != "random"
    checks: dict[str, dict[str, Any]] = {"finite": {"value": finite, "passed": finite}}
    for name, value in values.items():
        passed = value >= LEAST[name] if learnt and finite else None
        checks[name] = {"value": value, "at_least": LEAST[name], "passed": passed}
    return {
        "prompt": settings.prompts[0],
        "seed": settings.seed,
        "pictures": len(shown),
        "latents": {
            "mean": float(latents.mean()),
            "std": float(latents.std()),
            # The same on the same machine and versions; others differ in the last digits.
            "sha256": hashlib.sha256(latents.contiguous().numpy().tobytes()).hexdigest(),
        },
        "checks": checks,
        "shown": [shrunk(shown[index]) for index in spread(len(shown))],
    }


def run_video(
    parts: Parts,
    choice: ModelChoice,
    settings: VerifySettings,
    prompt: str,
    memory: str,
    clip: Path | None,
    advance: Callable[[int], None],
) -> tuple[dict[str, Any], list[Picture]]:
    """Generate one prompt with one memory; return what was measured, and the pictures to show.

    The video is written to `clip` if that is not None.
    """
    spec = parts.backbone.spec
    blocks, cuda = settings.num_blocks(spec), choice.config.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def generate(write: Callable[[Tensor], None]) -> tuple[dict[str, Any], Watcher]:
        watcher = Watcher(blocks, write, advance)
        speed = choice.speed(memory, blocks)
        return measure(parts, speed, blocks, prompt=prompt, seed=settings.seed, see=watcher), watcher

    if clip is None:
        times, watcher = generate(lambda pictures: None)
    else:
        with ClipWriter(clip, spec.picture_size, spec.pictures_per_second) as writer:
            times, watcher = generate(writer.write)
    in_use = times["memory_gb"]
    return {
        "prompt": prompt,
        "memory": memory,
        "blocks": blocks,
        **watcher.summary(),
        "block_ms": times["block"],
        "stages_ms": times["stages"],
        "first_picture_s": times["first_picture_s"],
        "pictures_per_second": 1e3 * spec.block_pictures / times["block"]["median"],
        "peak_gb": times["peak_gb"],
        "memory_last_to_middle": in_use[-1] / in_use[len(in_use) // 2] if in_use else None,
    }, watcher.pictures


def verify(
    choice: ModelChoice,
    settings: VerifySettings,
    folder: Path,
    *,
    reporter: Reporter,
    hashing: Reporter,
    videos: bool,
) -> tuple[dict[str, Any], dict[str, list[list[Picture]]]]:
    """Verify a model; returns the record as plain data, and by prompt the pictures of every memory.

    Clips of all runs are written to `folder` if `videos`; the pictures of the opening are under "". The reporter's
    progress counts pictures, that of `hashing` bytes.
    """
    choice = choice.fit(reporter.notice)
    files = [] if choice.random_weights else check_files(choice.config.backbone.settings, hashing)
    began = time.perf_counter()
    parts = choice.load(settings.prompts, reporter.notice)
    load_s = time.perf_counter() - began
    opening = check_opening(parts, choice, settings)
    shown: dict[str, list[list[Picture]]] = {"": [opening.pop("shown")]}
    spec = parts.backbone.spec
    pictures = spec.num_pictures(settings.num_blocks(spec) * spec.frames_per_block)
    advance = reporter.counter(len(settings.prompts) * len(settings.memories) * pictures)
    runs: list[dict[str, Any]] = []
    for number, prompt in enumerate(settings.prompts, start=1):
        shown[prompt] = []
        for memory in settings.memories:
            clip = folder / clip_name(number, memory) if videos else None
            run, kept = run_video(parts, choice, settings, prompt, memory, clip, advance)
            runs.append(run)
            shown[prompt].append(kept)
    checks = {
        "files": not any(file["verdict"].startswith("NOT") for file in files),
        **{f"first block: {name}": check["passed"] for name, check in opening["checks"].items()},
        "videos are finite": all(run["finite"] for run in runs),
    }
    device = choice.config.device
    record = {
        "version": VERSION,
        "backbone": choice.config.backbone.name,
        **parts.about,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "dtype": choice.config.dtype,
        "versions": versions(),
        "asked": asdict(settings),
        "size": {"rows": spec.picture_size[0], "columns": spec.picture_size[1], "layers": spec.layers},
        "files": files,
        "load_s": load_s,
        "first_block": opening,
        "runs": runs,
        "overhead": overheads(runs, settings.memories),
        # None: not judged, because the weights are random.
        "checks": checks,
        "passed": all(passed is not False for passed in checks.values()),
    }
    return record, shown


def clip_name(number: int, memory: str) -> str:
    """Name the clip of a prompt, counted from 1, and a memory."""
    return f"prompt-{number}-{memory.replace(':', '-')}.mp4"


def overheads(runs: Sequence[dict[str, Any]], memories: Sequence[str]) -> dict[str, float]:
    """Return what a block takes with each memory, relative to the first one: medians over all prompts."""
    median = {
        name: statistics.median(run["block_ms"]["median"] for run in runs if run["memory"] == name)
        for name in memories
    }
    return {name: value / median[memories[0]] for name, value in median.items()}
