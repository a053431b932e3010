"""This module manages the files of a run and lists all that it wrote: damage is found before a run continues.

`manifest.jsonl` has a line about the run, then one per finished block: size, time and digest of the block's files,
and digests of its lines in the run's other lists. It is only appended to. The state of a run, which is written
last, contains its own digest and one of the latents and trace up to its block, so it vouches for what came before.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from recap.contracts import State
from recap.errors import refuse
from recap.io.files import append_line, sha256_of, write_whole

MANIFEST = "manifest.jsonl"
STATE = "state.safetensors"
LATENTS = "latents.safetensors"
SUMMARY = "summary.json"
CAST = "subjects.cast"
# Characters of the prompt in a folder's name.
LONGEST_NAME = 48
OPENING = "opening.safetensors"
"""Latents of the pictures that a run continues: kept, so that it can be resumed when their file is gone."""

LISTS = ("trace.jsonl", "timing.jsonl")
"""The files with one line per block."""


def new_folder(prompt: str, kind: str) -> Path:
    """Name a folder of `runs` after the time, the first prompt, and the memory or another kind of run."""
    words = re.sub(r"\W+", "-", prompt.lower()).strip("-")
    if len(words) > LONGEST_NAME:
        words = words[:LONGEST_NAME].rpartition("-")[0] or words[:LONGEST_NAME]
    kind = re.sub(r"\W+", "-", kind.rpartition(":")[2])
    name = "-".join(part for part in (time.strftime("%Y%m%d-%H%M%S"), words, kind) if part)
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def digest_of(data: bytes) -> str:
    """Return the digest of some bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the digest of a file in hexadecimal."""
    return sha256_of(path, lambda size: None)


def digest_tensors(tensors: State, also: str = "") -> str:
    """Return the digest of named tensors on the CPU (names, types, shapes and values) and of a text."""
    digest = hashlib.sha256(also.encode())
    for name, value in sorted(tensors.items()):
        digest.update(repr((name, value.dtype, tuple(value.shape))).encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack_state(policy: State, decoder: State) -> State:
    """Return the states of a memory and of its decoder as one, on the CPU, ready to be written."""
    parts = {"policy": policy, "decoder": decoder}
    return {
        f"{part}.{name}": value.cpu().contiguous()
        for part, state in parts.items()
        for name, value in state.items()
    }


def unpack_state(tensors: State) -> tuple[State, State]:
    """Return the states of the memory and of the decoder that `pack_state` made one."""
    policy, decoder = (
        {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        for part in ("policy.", "decoder.")
    )
    return policy, decoder


def load_opening(folder: Path, rows: int, size: tuple[int, ...]) -> Tensor:
    """Read the latents of a run's opening: as many rows, any number of frames, and frames of this size."""
    path, remedy = folder / OPENING, "put it back or start the run again"
    try:
        latents = load_file(path)["latents"]
    except (OSError, SafetensorError, KeyError) as error:
        raise refuse("file", str(path), "is missing or damaged", remedy) from error
    shape = tuple(latents.shape)
    if len(shape) != 5 or (shape[0], *shape[2:]) != (rows, *size) or not latents.is_floating_point():
        raise refuse("file", str(path), f"must hold floats of {rows} rows and frames of {size}", remedy)
    return latents


class RunFolder:
    """Names, reads and writes the files of one run; all depend on its config, its opening's latents and its cast.

    `cast` is the digest of its subjects, "" without any.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], opening: Tensor | None, cast: str = "") -> None:
        self.path = path
        self._rows = range(len(config["seeds"]))
        about = {"config": digest_of(json.dumps(config, sort_keys=True).encode())}
        if opening is not None:
            about["opening"] = digest_tensors({"latents": opening.cpu()})
        if cast:
            about["cast"] = cast
        self._first = json.dumps(about).encode() + b"\n"
        self._digest = hashlib.sha256()

    def parts(self, block: int) -> list[Path]:
        """Name the files of a block: its latents, then the clip of each row."""
        work = self.path / "work"
        return [
            work / f"{block:06d}.safetensors",
            *(work / f"row{row}-{block:06d}.mp4" for row in self._rows),
        ]

    @property
    def videos(self) -> list[Path]:
        """Return the video of each row."""
        rows = self._rows
        return [self.path / ("video.mp4" if len(rows) == 1 else f"video-{row}.mp4") for row in rows]

    def read(self) -> list[bytes]:
        """Return the whole lines about blocks; refuses a manifest that is about other settings."""
        first, *lines = _whole_lines(self.path / MANIFEST) or [self._first]
        if first != self._first:
            limit = "was written under other settings than those in run.json, or for another opening"
            remedy = "put run.json and the opening back or start the run again"
            raise refuse("file", str(self.path / MANIFEST), limit, remedy)
        return lines

    def begin(self, block: int) -> None:
        """Continue with this block: a state vouches for all before it. No file changes."""
        self._digest = hashlib.sha256(self._first)
        for index, line in enumerate(self.read()[:block]):
            self._digest.update(_result(_entry(line, index)))

    def cut(self, blocks: int) -> None:
        """Drop all but the first blocks from the manifest and the other lists."""
        write_whole(self.path / MANIFEST, b"".join([self._first, *self.read()[:blocks]]))
        for name in LISTS:
            write_whole(self.path / name, b"".join(_whole_lines(self.path / name)[:blocks]))

    def add(self, block: int, trace: bytes, timing: bytes) -> None:
        """Describe a finished block: its files, and its lines in the other lists."""
        files = [_describe(path) for path in self.parts(block)]
        entry = {"block": block, "files": files, "lines": [digest_of(trace), digest_of(timing)]}
        append_line(self.path / MANIFEST, entry)
        self._digest.update(_result(entry))

    def write_state(self, block: int, policy: State, decoder: State) -> None:
        """Write the state before a block with its digest, and with that of the results up to then."""
        state = {"next_block": torch.tensor(block), **pack_state(policy, decoder)}
        before = self._digest.hexdigest()
        # One entry: safetensors writes several in any order, and equal states should be equal bytes.
        about = {"digests": f"{before} {digest_tensors(state, before)}"}
        write_whole(self.path / STATE, save(state, metadata=about))

    def read_state(self) -> tuple[int, State, State]:
        """Read the block that a state is for, and the states of memory and decoder, and continue there.

        It raises ValueError where the file was changed.
        """
        with safe_open(self.path / STATE, "pt") as file:
            names, about = file.keys(), file.metadata() or {}
            state = {name: file.get_tensor(name) for name in names}
        before, _, digest = about.get("digests", "").partition(" ")
        if digest != digest_tensors(state, before):
            raise ValueError("its digest is that of other values")
        block = int(state["next_block"])
        self.begin(block)
        if before != self._digest.hexdigest():
            raise ValueError(f"{MANIFEST} is not the one that it was written after")
        return block, *unpack_state(state)

    def count_whole(self, blocks: int, hashed: Collection[int]) -> tuple[int, Path | None]:
        """Count the first blocks, up to `blocks`, that are as they were written; and name the first file that is not.

        Files of their recorded size and time are read only for the blocks in `hashed`.
        """
        lines = self.read()
        lists = [_whole_lines(self.path / name) for name in LISTS]
        for block in range(blocks):
            entry = _entry(lines[block], block) if block < len(lines) else None
            if entry is None or len(entry["files"]) != len(self.parts(block)):
                return block, self.path / MANIFEST
            for name, own, digest in zip(LISTS, lists, entry["lines"], strict=True):
                if block >= len(own) or digest_of(own[block]) != digest:
                    return block, self.path / name
            for path, recorded in zip(self.parts(block), entry["files"], strict=True):
                if not _is_as_written(path, recorded, block in hashed):
                    return block, path
        return blocks, None

    def write_summary(self, blocks: int, seconds: float) -> None:
        """Write the summary of a finished run, with the digests of its results."""
        summary = {
            "blocks": blocks,
            "seconds": seconds,
            "videos": [path.name for path in self.videos],
            "files": {path.name: digest_file(path) for path in self._results()},
        }
        write_whole(self.path / SUMMARY, json.dumps(summary, indent=2).encode())

    def first_changed(self) -> Path | None:
        """Name the first file of a finished run that is not as its summary says; latents may have been deleted."""
        self.read()
        summary = _parsed((self.path / SUMMARY).read_bytes())
        files = summary.get("files")
        if not isinstance(files, dict) or summary.get("videos") != [path.name for path in self.videos]:
            return self.path / SUMMARY
        for path in self._results():
            if not path.is_file():
                if path.name != LATENTS:
                    return path
            elif digest_file(path) != files.get(path.name):
                return path
        return None

    def has_ended(self, from_block: int | None) -> bool:
        """Tell whether the run has ended: its summary alone proves nothing, the files it names must be there."""
        if not (self.path / SUMMARY).is_file():
            return False
        bad = self.first_changed()
        if bad is None and from_block is None:
            return True
        if (self.path / "work").is_dir():
            return False
        again = f"generate the run again with --from {self.path / 'run.json'}"
        if bad is None:
            raise refuse("--from-block", from_block, "the run is finished and its parts are gone", again)
        limit = "is missing or not what the finished run wrote"
        raise refuse("file", str(bad), limit, f"put it back, or {again}")

    def _results(self) -> list[Path]:
        return [*self.videos, *(self.path / name for name in (LATENTS, MANIFEST, *LISTS))]


def _describe(path: Path) -> list[int | str]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, digest_file(path)]


def _is_as_written(path: Path, recorded: list[Any], hashed: bool) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    if not hashed and recorded[:2] == [stat.st_size, stat.st_mtime_ns]:
        return True
    # A copy may have another time.
    return recorded[::2] == _describe(path)[::2]


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file; a last one that was cut short by a kill is left out."""
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _entry(line: bytes, block: int) -> dict[str, Any] | None:
    """Read a block's line of the manifest; None where it is not one."""
    found = _parsed(line)
    match found:
        case {"block": number, "files": [[_, _, _], *rest], "lines": [_, _]} if number == block:
            return found if all(isinstance(file, list) and len(file) == 3 for file in rest) else None
    return None


def _result(entry: dict[str, Any] | None) -> bytes:
    """Return what is the same in all runs of these settings, bit for bit: the digests of latents and trace."""
    return b"" if entry is None else f"{entry['files'][0][2]} {entry['lines'][0]}".encode()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
