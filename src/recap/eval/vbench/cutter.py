"""Cut a long video into the clips that VBench-Long judges, by its rule, but in one pass and with free names.

s = int(fps) * int(seconds) pictures a clip, one after the other; a rest becomes one more clip of s pictures that
ends with the video; a video shorter than s is one clip. VBench's own cutter holds the whole video as floats (23 GB
for 5 minutes), takes an old folder of clips for the new one, and loses clips of names with an underscore. Here s
pictures are held, clips lie under a digest of their source, and names have no underscore.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from recap.eval.sampling import clip_spans
from recap.io.files import staged_folder, write_whole
from recap.io.video import Clip, ClipWriter, Picture, open_clip

CRF = 12
"""x264's setting for clips; VBench's own encodes them a second time at 23, which costs detail."""

_LIST = "cut.json"
_NAME_BYTES = 200  # of the 255 a file name may have; seed and number follow


class Cut(NamedTuple):
    """The clips of one video, in order."""

    clips: tuple[Path, ...]
    firsts: Path | None  # the first pictures of all clips as a clip; None where there is one clip only
    num_pictures: int


def clip_label(prompt: str, seed: int) -> str:
    """The start of its clips' names. VBench reads the action of `human_action` from there, up to the first hyphen."""
    plain = prompt.replace("_", " ").replace("/", " ")
    short = plain.encode()[:_NAME_BYTES].decode(errors="ignore")
    return f"{short}-{seed}"


def cut_video(path: Path, folder: Path, label: str, seconds: int, source: str) -> Cut:
    """The clips of a video under `folder`; `source` is its SHA-256, so that other videos' clips are never taken.

    A second call finds the clips of the first. A folder of clips is there whole or not at all.
    """
    asked = json.dumps([source, label, seconds, CRF]).encode()
    goal = folder / hashlib.sha256(asked).hexdigest()[:20]
    if (found := _whole(goal)) is not None:
        return found
    try:
        with staged_folder(goal, {_LIST, *_names(_listed(goal) or {})}) as staged:
            made = _cut(open_clip(path), staged, label, seconds)
            write_whole(staged / _LIST, json.dumps({"video": path.name, "source": source, **made}).encode())
    except ValueError:
        # Two runs may share a folder, a dimension each: then the other one has cut this video meanwhile.
        if (found := _whole(goal)) is None:
            raise
        return found
    return _as_cut(goal, made)


def _cut(clip: Clip, folder: Path, label: str, seconds: int) -> dict[str, object]:
    size = int(clip.fps) * int(seconds)
    clip_spans(1, clip.fps, seconds)  # refuses clips of no pictures
    shape = (clip.height, clip.width)
    names: list[str] = []
    count = 0
    held: deque[Picture] = deque(
        maxlen=size
    )  # the last s pictures: a last clip may begin before the one before ends
    with ExitStack() as opened:
        firsts = opened.enter_context(_writer(folder / f"{label}-firsts.mp4", shape, clip.fps))

        def finish(name: str) -> None:
            with _writer(folder / name, shape, clip.fps) as writer:
                for picture in held:
                    _write(writer, picture)
            _write(firsts, held[0])
            names.append(name)

        for count, picture in _counted(clip):
            held.append(picture)
            if count % size == 0:
                finish(f"{label}-{len(names):03d}.mp4")
        if count < size:
            finish(f"{label}-full.mp4")
        elif count % size:
            finish(f"{label}-{len(names):03d}.mp4")
    assert len(names) == len(clip_spans(count, clip.fps, seconds))
    one = len(names) == 1
    if one:
        firsts.path.unlink()
    return {"clips": names, "firsts": None if one else firsts.path.name, "num_pictures": count}


def _counted(clip: Clip) -> Iterator[tuple[int, Picture]]:
    return enumerate(clip.pictures(), start=1)


def _writer(path: Path, shape: tuple[int, int], fps: float) -> ClipWriter:
    return ClipWriter(
        path, shape, int(fps), quality=CRF
    )  # whole pictures a second, as VBench's own writes them


def _write(writer: ClipWriter, picture: Picture) -> None:
    writer.write(torch.from_numpy(picture).permute(2, 0, 1)[None])


def _listed(folder: Path) -> dict[str, object] | None:
    try:
        made = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) else None


def _whole(folder: Path) -> Cut | None:
    made = _listed(folder)
    there = made is not None and all(_there(folder / name) for name in _names(made))
    return _as_cut(folder, made) if made is not None and there else None


def _names(made: dict[str, object]) -> list[str]:
    clips, firsts = made.get("clips"), made.get("firsts")
    return [*(clips if isinstance(clips, list) else []), *([firsts] if isinstance(firsts, str) else [])]


def _there(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _as_cut(folder: Path, made: dict[str, object]) -> Cut:
    clips, firsts = made["clips"], made["firsts"]
    assert isinstance(clips, list)
    count = made["num_pictures"]
    assert isinstance(count, int)
    whole = tuple(folder / name for name in clips)
    return Cut(whole, folder / firsts if isinstance(firsts, str) else None, count)
