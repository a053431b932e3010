"""This module reads and writes zipped run folders, so that runs move between `recap generate` and the studio."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from recap.config import RunConfig, refuse_code
from recap.errors import RecapError, refuse
from recap.io.cast import Subject, digest_of_cast, read_cast, read_cast_bytes, write_cast
from recap.io.files import append_line, write_whole
from recap.io.record import versions, write_record
from recap.io.run_folder import CAST, LATENTS, RunFolder
from recap.io.trace import BlockTrace
from recap.io.video import ClipWriter
from recap.plan import Shot, make_plan
from recap.session.values import Cue, MemoryState, cues_of
from recap.studio.engine import Engine
from recap.studio.live import LiveSession
from recap.types import BackboneSpec

MOST_ENTRIES = 100_000
REMEDY = "send the folder of a run of recap generate, zipped"


def export_run(live: LiveSession, engine: Engine, track: str, more_s: float) -> bytes:
    """Return the current branch as a zipped run folder, which `recap generate --resume` continues by some seconds."""
    config, subjects, memory, blocks = engine.call(lambda: _present(live, track)).result()
    spec, branch = live.clock.spec, live.record.current
    shots = shots_of(live.branch.cues, blocks, more_s, spec)
    config = replace(config, shots=shots, cast=tuple(f"{subject.name}.cast" for subject in subjects))
    with tempfile.TemporaryDirectory(prefix="recap-studio-") as temporary:
        folder = Path(temporary) / "run"
        (folder / "work").mkdir(parents=True)
        files = RunFolder(folder, config.to_dict(), None, digest_of_cast(subjects))
        if subjects:
            write_cast(folder / CAST, subjects)
        write_record(folder, config.to_dict(), versions(), spec, config.backbone.settings)
        files.cut(0)
        files.begin(0)
        decoder = engine.call(live.tracks[track].session.backbone.decoder).result()
        for block in range(blocks):
            info = live.store.read_info(track, branch, block)
            latents = live.store.read_latents(track, branch, [block])[block].to(config.device)
            # A block at a time, so that sessions have their turns in between.
            pixels = engine.call(lambda known=latents: decoder.decode(known)).result()  # type: ignore[misc]
            own, clip = files.parts(block)
            with ClipWriter(clip, spec.picture_size, spec.pictures_per_second) as writer:
                writer.write(pixels[0].cpu())
            write_whole(own, save({"latents": latents.cpu().contiguous()}))
            trace = append_line(folder / "trace.jsonl", info["trace"])
            timing = append_line(
                folder / "timing.jsonl", {"block": block, "seconds": info["ms"]["generate"] / 1e3}
            )
            files.add(block, trace, timing)
        files.write_state(blocks, memory.policy, memory.decoder)
        return _zipped(folder)


def _present(live: LiveSession, track: str) -> tuple[RunConfig, list[Subject], MemoryState, int]:
    """Return what a run folder needs besides blocks; refuses changes of a session that it cannot record."""
    live.check_sound()
    live.check_video(track, live.record.current)
    if live.branch.changes or live.branch.rule:
        kinds = sorted(
            {change["kind"] for change in live.branch.changes} | ({"set"} if live.branch.rule else set())
        )
        limit = f"a run folder cannot say what happened to the memory ({', '.join(kinds)})"
        raise refuse("run", live.record.id, limit, "download the video, or a branch from before that")
    live.settle()
    session = live.tracks[track].session
    if not session.next_block:
        raise refuse("run", live.record.id, "nothing is generated yet", "wait for the first block")
    paths = [Path(member) for member in live.tracks[track].config.cast]
    subjects = [subject for path in paths for subject in read_cast(path)]
    return session.config, subjects, session.snapshot().memory, session.next_block


def shots_of(cues: dict[int, Cue], blocks: int, more_s: float, spec: BackboneSpec) -> tuple[Shot, ...]:
    """Return the script of these prompts, which continues beyond the last block."""
    starts = sorted(cues)
    end = max(blocks, starts[-1] + 1) + round(max(0.0, more_s) / spec.block_s)
    spans = zip(starts, [*starts[1:], end], strict=True)
    return tuple(
        Shot(cues[start].prompt, (stop - start) * spec.block_s, cues[start].cut, cues[start].reread)
        for start, stop in spans
    )


def _zipped(folder: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                archive.write(path, f"run/{path.relative_to(folder)}")
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class UploadedRun:
    """Holds what a session needs of a run folder."""

    config: RunConfig
    cues: dict[int, Cue]
    subjects: list[Subject]
    latents: dict[int, Tensor]
    traces: dict[int, BlockTrace]


def read_run(data: bytes, most: int, backbone: str, spec: BackboneSpec) -> UploadedRun:
    """Read a zipped run folder: names are looked up in it, and nothing is unpacked to where they say."""
    files = _members(data, most)
    try:
        config = json.loads(files["run.json"])["config"]
        refuse_code(config, "run.json")
        config = RunConfig.from_dict({**config, "device": "auto", "dtype": "auto"})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, RecapError) else "its run.json is not that of a run"
        raise refuse("upload", "run.json", why, REMEDY) from error
    if config.backbone.name != backbone or len(config.seeds) != 1 or config.opening:
        about = f"{config.backbone.name}, {len(config.seeds)} rows" + (
            ", with an opening" if config.opening else ""
        )
        limit = f"this studio takes runs of {backbone} with one row and no opening"
        raise refuse("upload", about, limit, "start the studio with the run's --backbone")
    subjects = _subjects(files[CAST]) if CAST in files else []
    if bool(subjects) != bool(config.cast):
        raise refuse("upload", CAST, "is not the cast that run.json names", REMEDY)
    plan = make_plan([config.shots], spec)
    return UploadedRun(
        replace(config, cast=()),
        cues_of(plan),
        subjects,
        _latents(files, spec),
        _traces(files.get("trace.jsonl", b"")),
    )


def _members(data: bytes, most: int) -> dict[str, bytes]:
    """Return the files of an archive by their name below the folder of run.json; refuses what unpacks to too much."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            total = sum(entry.file_size for entry in entries)
            if len(entries) > MOST_ENTRIES or total > 4 * most:
                limit = f"unpacked at most {4 * most} bytes are read"
                raise refuse("upload", f"{total} bytes", limit, "send less")
            roots = [e.filename.removesuffix("run.json") for e in entries if e.filename.endswith("run.json")]
            if not roots:
                raise refuse("upload", f"{len(entries)} files", "holds no run.json", REMEDY)
            root = min(roots, key=len)
            # A size that the header understates ends the reading there, with an error.
            return {
                entry.filename.removeprefix(root): archive.read(entry)
                for entry in entries
                if entry.filename.startswith(root) and not entry.filename.endswith(".mp4")
            }
    except RecapError:
        raise
    except Exception as error:
        # Archives that were made to break the reader break it in many ways.
        raise refuse("upload", f"{len(data)} bytes", "is not a zip file that can be read", REMEDY) from error


def _subjects(data: bytes) -> list[Subject]:
    try:
        return read_cast_bytes(data)
    except RecapError as error:
        raise refuse("upload", CAST, error.limit, REMEDY) from error


def _latents(files: dict[str, bytes], spec: BackboneSpec) -> dict[int, Tensor]:
    """Return the latents by block: of a finished run from one file, of a stopped one from a file a block."""
    length, frame = spec.frames_per_block, (spec.latent_channels, *spec.latent_size)

    def read(name: str) -> Tensor:
        try:
            found = load(files[name])["latents"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise refuse("upload", name, "is damaged", REMEDY) from error
        whole = found.ndim == 5 and found.shape[0] == 1 and tuple(found.shape[2:]) == frame
        if not whole or found.shape[1] % length or not found.is_floating_point():
            raise refuse("upload", name, f"must hold blocks of {length} frames of {frame}", REMEDY)
        if not bool(torch.isfinite(found).all()):
            raise refuse("upload", name, "holds NaN or infinity", REMEDY)
        return found

    if LATENTS in files:
        return dict(enumerate(read(LATENTS).split(length, dim=1)))
    found: dict[int, Tensor] = {}
    while f"work/{len(found):06d}.safetensors" in files:
        found[len(found)] = read(f"work/{len(found):06d}.safetensors")
    if not found:
        raise refuse("upload", "latents", "the run has no finished block", REMEDY)
    return found


def _traces(data: bytes) -> dict[int, BlockTrace]:
    """Return the lines of a trace by block; what cannot be read is left out, since it is only shown."""
    found = {}
    for line in data.splitlines():
        try:
            trace = BlockTrace.from_json(json.loads(line))
        except (ValueError, AttributeError, RecursionError):
            continue
        if isinstance(trace.block, int):
            found[trace.block] = trace
    return found
