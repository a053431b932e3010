"""Cuts a long video into the clips that VBench-Long scores, by its rule, but in one pass.

A clip has s = int(fps) * int(seconds) pictures. Clips follow each other; a remainder becomes one more clip of s
pictures that ends with the video; a video shorter than s is one clip. VBench's own cutter loads the whole video as
floats (23 GB for 5 minutes), reuses an old folder of clips for a new video, and loses clips whose name has an
underscore. Here at most s pictures are in memory, clips are stored under a digest of their source, and names have no
underscore.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch

from recap.eval.sampling import cut_clips
from recap.io.files import staged_folder, write_whole
from recap.io.video import Clip, ClipWriter, Picture, open_clip

CRF = 12
"""The x264 setting for clips; VBench encodes them a second time at 23, which costs detail."""

_LIST = "cut.json"
# A file name may have 255 bytes; seed and number follow the prompt.
_NAME_BYTES = 200


class Cut(NamedTuple):
    """The clips of one video, in order; `firsts` is a clip of their first pictures, None if there is only one."""

    clips: tuple[Path, ...]
    firsts: Path | None

    @property
    def files(self) -> list[Path]:
        return [*self.clips, *([self.firsts] if self.firsts else [])]


def clip_label(prompt: str, seed: int) -> str:
    """Return the start of the clips' names; VBench reads the action of `human_action` there, up to a hyphen."""
    plain = prompt.replace("_", " ").replace("/", " ")
    short = plain.encode()[:_NAME_BYTES].decode(errors="ignore")
    return f"{short}-{seed}"


def cut_video(path: Path, folder: Path, label: str, seconds: int, source: str) -> Cut:
    """Cut a video into clips under `folder`; `source` is its SHA-256, so clips of another video are never reused.

    A second call finds the clips of the first. A folder of clips is either complete or absent.
    """
    identity = json.dumps([source, label, seconds, CRF]).encode()
    goal = folder / hashlib.sha256(identity).hexdigest()[:20]
    old = _listed(goal)
    if old and all(file.is_file() and file.stat().st_size > 0 for file in old.files):
        return old
    try:
        with staged_folder(goal, {_LIST, *(file.name for file in (old.files if old else []))}) as staged:
            made = _cut(open_clip(path), staged, label, seconds)
            write_whole(staged / _LIST, json.dumps({"video": path.name, "source": source, **made}).encode())
    except ValueError:
        # Two runs may share a folder, each with its own dimensions: the other one may have cut this video meanwhile.
        if _listed(goal) == old:
            raise
    cut = _listed(goal)
    assert cut is not None
    return cut


def _cut(clip: Clip, folder: Path, label: str, seconds: int) -> dict[str, object]:
    """Write the clips and return their list."""
    names: list[str] = []

    def writer(name: str) -> ClipWriter:
        # The rate is a whole number, as VBench's own cutter writes it.
        return ClipWriter(folder / name, (clip.height, clip.width), int(clip.fps), quality=CRF)

    with writer(f"{label}-firsts.mp4") as firsts:
        for part in cut_clips(clip, seconds):
            number = "full" if len(part) < int(clip.fps) * seconds else f"{len(names):03d}"
            names.append(f"{label}-{number}.mp4")
            with writer(names[-1]) as file:
                for picture in part:
                    _write(file, picture)
            _write(firsts, part[0])
    if len(names) == 1:
        firsts.path.unlink()
    return {"clips": names, "firsts": firsts.path.name if len(names) > 1 else None}


def _write(writer: ClipWriter, picture: Picture) -> None:
    writer.write(torch.from_numpy(picture).permute(2, 0, 1)[None])


def _listed(folder: Path) -> Cut | None:
    """Return what the folder's list names, whether or not the files are still there."""
    try:
        made = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        firsts = folder / made["firsts"] if made["firsts"] else None
        return Cut(tuple(folder / name for name in made["clips"]), firsts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
