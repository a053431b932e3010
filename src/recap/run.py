"""This module is the only place where a config becomes parts, a rollout and files.

A run is a folder. While a run is under way `work/` holds one clip and one file of latents per block, and
`state.safetensors` all that later blocks depend on; each file is whole or absent, and the state is written last.
So a killed run resumes from its last whole block and ends in the same latents, trace and state as an undisturbed one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from recap.attention.context import OWN_KERNELS
from recap.backbones.wan.quantised import quantise
from recap.config import DTYPES, RunConfig, from_settings, notice_device, read_record
from recap.contracts import Admission, Backbone, Decoder, Flow, FlowEstimator, MemoryPolicy
from recap.errors import RecapError, refuse
from recap.fast.accelerate import accelerate, accelerate_admission, accelerate_flow, choose_aside
from recap.fast.fitting import describe_fit, fit_card
from recap.fast.ranks.admission import LedAdmission
from recap.fast.ranks.backbone import split_backbone
from recap.fast.ranks.conducting import collect_state, conduct, restore_state
from recap.fast.ranks.group import LONE, Ranks
from recap.fast.ranks.states import split_memory
from recap.fast.ranks.wan import RankedKernels
from recap.fast.second_device import move_admission, move_decoder
from recap.flow import build_flow, resolve_flow
from recap.io import cast as casts
from recap.io.devices import let_segments_grow
from recap.io.files import alone_in, append_line, check_plain, is_vacant, remove_strays, write_whole
from recap.io.opening import read_opening
from recap.io.record import check_record, notice_changes, versions, write_record
from recap.io.report import SILENT, Notice, Reporter
from recap.io.run_folder import CAST, LATENTS, OPENING, STATE, RunFolder, load_opening
from recap.io.trace import BlockTrace, read_seconds
from recap.io.video import ClipWriter, join_clips
from recap.memory.pinned import join_cast
from recap.plan import Plan, make_plan
from recap.rollout import Resume, Rollout, at_once, reach, read_alone, rollout
from recap.types import BackboneSpec, GeneratedBlock, states_on_host

# The state of a public model is a gigabyte: generating a few blocks again is cheaper than writing it often.
LONG_WRITE_S = 0.3
BUSY = ("--resume", "another process is working on this run", "wait for it, or end it first")


def build_backbone(
    config: RunConfig,
    notice: Notice = print,
    words: Mapping[str, str] = MappingProxyType({}),
    ranks: Ranks = LONE,
) -> Backbone:
    """Load the run's backbone, ready to generate; `words` are those of its cast."""
    notice_device(config.device, notice)
    let_segments_grow(config.device)
    for line in describe_fit(config) if ranks.alone else []:
        notice(line)
    prompts = list(dict.fromkeys(casts.spell_out(shot.prompt, words) for shot in config.shots))
    made: Backbone = config.backbone.settings.build(
        device=config.device, dtype=DTYPES[config.dtype], prompts=prompts, notice=notice
    )
    quantise(made, config.precision, notice)
    if config.decoder_device and ranks.leads:
        move_decoder(made, config.decoder_device)
    if not ranks.alone:
        return split_backbone(made, ranks, fast=not config.eager)
    return made if config.eager else accelerate(made)


def build_memory(
    config: RunConfig, spec: BackboneSpec, notice: Notice = print, ranks: Ranks = LONE
) -> MemoryPolicy:
    """Make the run's memory, empty; its admission and flow are made only if it asks for them."""
    away = config.decoder_device

    def admission() -> Admission:
        flow: FlowEstimator = _no_flow
        # Otherwise neither weights nor OpenCV are needed.
        if config.admission.settings.needs_flow:
            found = build_flow(config.flow, device=away or config.device, notice=notice, backbone=spec.name)
            flow = found if config.eager else accelerate_flow(found)
        made: Admission = config.admission.settings.build(spec, flow)
        made = made if config.eager else accelerate_admission(made, away or config.device)
        return move_admission(made, away, config.device) if away else made

    led = admission if ranks.alone else partial(LedAdmission, ranks, admission)
    return split_memory(config.memory.settings.build(spec, led), ranks)


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
        device = config.decoder_device or config.device
        return replace(config, flow=resolve_flow("auto", notice, backbone=spec.name, device=device))
    return config


def encode_opening(config: RunConfig, backbone: Backbone, notice: Notice) -> Tensor:
    """Read the pictures that a video continues, and encode them; the latents are the same for every row."""
    pixels = read_opening(config.opening, backbone.spec, notice).to(config.device)
    return backbone.encode(pixels).repeat(len(config.seeds), 1, 1, 1, 1)


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("an admission with needs_flow = False asked for flow")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Names the files of a finished run."""

    folder: Path
    # One per row of the batch.
    videos: tuple[Path, ...]
    num_blocks: int
    num_pictures: int


def generate(
    config: RunConfig, folder: Path, *, reporter: Reporter = Reporter(), ranks: Ranks = LONE
) -> RunRecord:
    """Start a run in a new or empty folder and finish it; progress counts blocks, at pictures per second."""
    if folder.is_dir():
        check_plain(folder, "--out")
    if folder.exists() and not (folder.is_dir() and is_vacant(folder, {OPENING, CAST})):
        limit = "already exists and is not empty"
        raise refuse("--out", str(folder), limit, "choose another folder, or continue it with --resume")
    # Everything that can be refused is refused before a file is made.
    run = RunParts(config, folder, reporter, fresh=True, ranks=ranks)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, *BUSY):
        if not is_vacant(folder, {OPENING, CAST}):
            raise refuse("--out", str(folder), "another run began there just now", "choose another folder")
        if run.opening_latents is not None:
            write_whole(folder / OPENING, save({"latents": run.opening_latents.cpu().contiguous()}))
        if run.cast:
            casts.write_cast(folder / CAST, run.cast)
        settings = run.config.to_dict()
        write_record(folder, settings, versions(), run.backbone.spec, config.backbone.settings)
        return run.finish()


def resume(
    folder: Path,
    *,
    reporter: Reporter = Reporter(),
    from_block: int | None = None,
    trust_code: bool = False,
    ranks: Ranks = LONE,
) -> RunRecord:
    """Continue a stopped run from its last whole block; a finished one is left as it is.

    `from_block` keeps only the blocks before it, and needs no state: the memory is made again from their latents.
    A config that names code to import is refused without `trust_code`.
    """
    about = read_record(folder, "--resume", trust_code=trust_code)
    config = RunConfig.from_dict(about["config"])
    notice_changes(about, reporter.notice)
    with alone_in(folder, *BUSY):
        # In a finished run, too: its page is written last, and may have been half done when the process was killed.
        remove_strays(folder)
        run = RunParts(config, folder, reporter, ranks=ranks)
        check_record(about, run.backbone.spec, run.config.backbone.settings)
        return run.finish(from_block)


def read_spec(about: dict[str, Any]) -> BackboneSpec:
    """Read the spec that a run recorded; the record of an older version has none, and its backbone is loaded."""
    if "spec" not in about:
        return build_backbone(RunConfig.from_dict(about["config"]), SILENT.notice).spec
    spec: BackboneSpec = from_settings(BackboneSpec, about["spec"], "spec")
    return spec


def is_finished(folder: Path) -> bool:
    """Tell whether a run has ended; refuses results that are not as it wrote them. No model is loaded."""
    about = read_record(folder, trust_code=True)
    config, opening = about["config"], None
    if config.get("opening"):
        spec = read_spec(about)
        opening = load_opening(folder, len(config["seeds"]), (spec.latent_channels, *spec.latent_size))
    cast = casts.digest_of_cast(casts.read_cast(folder / CAST)) if config.get("cast") else ""
    return RunFolder(folder, config, opening, cast).has_ended(None)


class RunParts:
    """Has the parts and the folder of one run; of several processes, only the leader uses the folder."""

    def __init__(
        self, config: RunConfig, folder: Path, reporter: Reporter, *, fresh: bool = False, ranks: Ranks = LONE
    ):
        self.folder = folder
        self.reporter = reporter
        self._ranks = ranks
        if fresh and ranks.alone:
            config = fit_card(config, reporter.notice)
        ranks.begin(config.to_dict(), folder, fresh)
        # A resumed run has its own copy of the cast.
        copy = (str(folder / CAST),) if config.cast and not fresh else config.cast
        words = casts.read_words(copy)
        self.backbone = build_backbone(config, reporter.notice, words, ranks)
        self.cast = casts.read_members(copy, self.backbone, config.device, reporter.notice)
        self.opening_latents: Tensor | None = None
        if config.opening:
            found = {"latents": self._read_opening(config, fresh)} if ranks.leads else None
            self.opening_latents = ranks.share(found, config.device)["latents"]
        opening_frames = 0 if self.opening_latents is None else self.opening_latents.shape[1]
        plan = make_plan([config.shots] * len(config.seeds), self.backbone.spec, opening_frames)
        self.plan = Plan(tuple(casts.with_cast(block, words) for block in plan.blocks))
        for prompts in dict.fromkeys(block.prompts for block in self.plan.blocks):
            # A prompt that cannot be read is refused before any file is made.
            self.backbone.condition(prompts)
        # Last, as it may fetch weights: a run that is refused has not waited for them.
        self.config = settle_flow(config, self.backbone.spec, reporter.notice) if ranks.leads else config
        self.policy = build_memory(self.config, self.backbone.spec, reporter.notice, ranks)
        join_cast(self.policy, self.cast, self.plan.blocks[0].prompts, partial(read_alone, self.backbone))
        self.decoder: Decoder = self.backbone.decoder()
        plain, digest = self.config.to_dict(), casts.digest_of_cast(self.cast)
        self.files = RunFolder(folder, plain, self.opening_latents, digest)
        ranks.done()

    def _read_opening(self, config: RunConfig, fresh: bool) -> Tensor:
        """Read the latents that the video continues, the same for every row; a resumed run has its own copy."""
        spec, rows = self.backbone.spec, len(config.seeds)
        if fresh:
            return encode_opening(config, self.backbone, self.reporter.notice)
        return load_opening(self.folder, rows, (spec.latent_channels, *spec.latent_size)).to(config.device)

    def finish(self, from_block: int | None = None) -> RunRecord:
        """Generate what is missing, then join the parts."""
        total = len(self.plan.blocks)
        if not self.files.has_ended(from_block):
            start = self._restore() if from_block is None else self._rebuild(from_block)
            self.reporter.progress(start, total, 0.0)
            self._generate(start)
            self._join()
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        pictures = self.backbone.spec.num_pictures(self.plan.blocks[-1].end_frame)
        return RunRecord(self.folder, tuple(self.files.videos), total, pictures)

    def start(self, resume: Resume) -> Rollout:
        """Start a rollout of these parts."""
        return rollout(
            self.backbone,
            self.policy,
            self.plan,
            seeds=self.config.seeds,
            decoder=self.decoder,
            resume=replace(resume, opening_latents=self.opening_latents),
            aside=at_once if self.config.eager else choose_aside(self.config.device),
            sampling=self.config.sampling,
            kernels=OWN_KERNELS if self._ranks.alone else RankedKernels(self._ranks),
        )

    def _rollout(self, resume: Resume) -> Iterator[GeneratedBlock]:
        return conduct(self._ranks, resume, self.start)

    def _generate(self, start: int) -> None:
        (self.folder / "work").mkdir(exist_ok=True)
        total = len(self.plan.blocks)
        recent = [self._load(block) for block in self._recent(start)]
        first = self._load(0)[:, :1] if start else None
        started = began = rested = time.perf_counter()
        pictures = 0
        for made in self._rollout(Resume(block=start, recent_latents=recent, first_latent=first)):
            index, done = made.block.index, made.block.index + 1
            trace = self._record(made)
            seconds = time.perf_counter() - began
            timing = append_line(self.folder / "timing.jsonl", {"block": index, "seconds": seconds})
            self.files.add(index, trace, timing)
            due = done % self.config.checkpoint_every == 0 and time.perf_counter() >= rested
            if due or done == total:
                rested = self._checkpoint(done)
            began = time.perf_counter()
            pictures += made.pixels.shape[1]
            self.reporter.progress(done, total, pictures / (began - started))

    def _record(self, made: GeneratedBlock) -> bytes:
        """Write the pictures, latents and trace of a finished block; returns its line of the trace."""
        index = made.block.index
        if not bool(torch.isfinite(made.latents).all()):
            remedy = "try --dtype float32 or other memory settings"
            raise refuse("latents", f"block {index}", "holds NaN or infinity", remedy)
        spec = self.backbone.spec
        latents, *clips = self.files.parts(index)
        for path, pixels in zip(clips, made.pixels, strict=True):
            with ClipWriter(path, spec.picture_size, spec.pictures_per_second) as clip:
                clip.write(pixels)
        write_whole(latents, save({"latents": made.latents.detach().cpu().contiguous()}))
        line = BlockTrace.of(made, offered=self.config.trace_offered)
        return append_line(self.folder / "trace.jsonl", line.to_json())

    def _checkpoint(self, done: int) -> float:
        """Write the state; returns the time from which the next may be written.

        Large states take a tenth of the time at most.
        """
        began = time.perf_counter()
        with states_on_host():
            policy, decoder = collect_state(self._ranks, self.policy), self.decoder.state()
        self.files.write_state(done, policy, decoder)
        ended = time.perf_counter()
        took = ended - began
        return ended + (9 * took if took > LONG_WRITE_S else 0.0)

    def _restore(self) -> int:
        """Load the last state, check all before it and drop what came after it. Returns the next block."""
        path, start = self.folder / STATE, 0
        if path.exists():
            start = self._load_state(path)
            self._check(start, {0, *self._recent(start)})
        elif len(self.files.read()) > self.config.checkpoint_every:
            raise self._damaged(path, "is missing")
        else:
            self.files.begin(0)
        self.files.cut(start)
        return start

    def _load_state(self, path: Path) -> int:
        """Load the state into memory and decoder; returns its next block."""
        try:
            start, *parts = self.files.read_state()
            device = self.config.device
            policy, decoder = ({name: value.to(device) for name, value in part.items()} for part in parts)
            restore_state(self._ranks, self.policy, policy)
            self.decoder.load_state(decoder)
        # Each memory reads its own state, and one that was changed on purpose may fail in any way.
        except Exception as error:
            raise self._damaged(path, f"is damaged ({error or type(error).__name__})") from error
        return start

    def _rebuild(self, block: int) -> int:
        """Make memory and decoder again as they were before a block, from the latents of all before it."""
        most = len(self.files.read())
        if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block <= most:
            raise refuse("--from-block", block, f"must be 0 to {most}", "0 starts again")
        self._check(block, range(block))
        self.reporter.notice(f"making the memory again from {block} blocks")
        for _ in islice(self._rollout(Resume(latents_of=lambda earlier: self._load(earlier.index))), block):
            pass
        self.files.begin(block)
        # Before anything is dropped: a run that is stopped in between can still be resumed.
        self._checkpoint(block)
        self.files.cut(block)
        return block

    def _check(self, blocks: int, hashed: Collection[int]) -> None:
        """Refuse a file of the first blocks that is not as it was written; see `RunFolder.count_whole`."""
        whole, bad = self.files.count_whole(blocks, hashed)
        if bad is not None:
            raise self._damaged(bad, "is missing or not what the run wrote", whole)

    def _damaged(self, path: Path, what: str, whole: int | None = None) -> RecapError:
        """Make the error about a file that a resumed run cannot use, with the number of blocks that are whole."""
        if whole is None:
            most = len(self.files.read())
            whole, _ = self.files.count_whole(most, range(most))
        limit = f"{what}, and the first {whole} blocks are whole"
        return refuse("file", str(path), limit, f"put it back, or continue with --from-block {whole}")

    def _join(self) -> None:
        blocks = range(len(self.plan.blocks))
        self._check(len(blocks), blocks)
        for row, video in enumerate(self.files.videos):
            join_clips([self.files.parts(index)[1 + row] for index in blocks], video)
        latents = [load_file(self.files.parts(index)[0])["latents"] for index in blocks]
        write_whole(self.folder / LATENTS, save({"latents": torch.cat(latents, dim=1)}))
        self.files.write_summary(len(blocks), sum(read_seconds(self.folder / "timing.jsonl")))

    def _recent(self, start: int) -> range:
        """Return the blocks before `start` that the next block may need."""
        return range(max(0, start - reach(self.backbone.spec)), start)

    def _load(self, block: int) -> Tensor:
        return load_file(self.files.parts(block)[0], device=self.config.device)["latents"]
