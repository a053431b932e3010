"""The shelf stores the subjects that clients saved or uploaded, one cast file each, under the subject's name."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recap.errors import RecapError, refuse
from recap.io.cast import (
    NAME,
    SUFFIX,
    Subject,
    cut_subject,
    new_scores,
    read_cast,
    read_cast_bytes,
    tokens_in_box,
    write_cast,
)
from recap.io.files import write_whole
from recap.io.trace import BlockTrace
from recap.studio.directing import find_listed
from recap.studio.live import LiveSession
from recap.studio.messages import NewSubject
from recap.studio.segments import decode_pictures, jpeg_of
from recap.studio.store import MEDIA


class Shelf:
    """Reads and writes the casts of a studio; names of clients are looked up, never used as paths."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most

    def names(self) -> list[str]:
        found = (path.stem for path in self._folder.glob(f"*{SUFFIX}"))
        return sorted(name for name in found if NAME.fullmatch(name))

    def path(self, name: str) -> Path:
        """Return the file of a subject that is on the shelf."""
        if name not in self.names():
            known = ", ".join(self.names()) or "none"
            raise refuse("cast", name, f"there is no such subject; there is {known}", "name one of these")
        return self._folder / f"{name}{SUFFIX}"

    def shown_all(self) -> list[dict[str, Any]]:
        return [self.shown(name) for name in self.names()]

    def shown(self, name: str) -> dict[str, Any]:
        """Return what a page shows of a subject."""
        try:
            subject = read_cast(self.path(name))[0]
        except ValueError as error:
            if name not in self.names():
                raise
            # The message of the refusal has the path of the file, which clients must not see.
            raise refuse("cast", name, "its file is damaged", "delete it") from error
        even = subject.thumbnail[: subject.thumbnail.shape[0] // 2 * 2, : subject.thumbnail.shape[1] // 2 * 2]
        picture = base64.b64encode(jpeg_of(even)).decode() if even.size else ""
        return {
            "name": subject.name,
            "words": subject.words,
            "tokens": subject.num_tokens,
            "about": dict(subject.about),
            "thumbnail": f"data:image/jpeg;base64,{picture}" if picture else None,
        }

    def save(self, subject: Subject) -> dict[str, Any]:
        """Put a subject on the shelf, under a name that is free."""
        if subject.name in self.names():
            raise refuse("name", subject.name, "that name is in use", "choose another, or delete the old one")
        if len(self.names()) >= self._most:
            limit = f"at most {self._most} subjects are kept"
            raise refuse("casts", len(self.names()), limit, "delete one of them")
        self._put(subject)
        return self.shown(subject.name)

    def _put(self, subject: Subject) -> None:
        write_cast(self._folder / f"{subject.name}{SUFFIX}", [subject])

    def upload(self, data: bytes) -> list[dict[str, Any]]:
        """Put all subjects of an uploaded cast file on the shelf; its bytes decide whether it is one."""
        try:
            subjects = read_cast_bytes(data)
        except RecapError as error:
            remedy = "send a file of recap cast save"
            raise refuse("upload", f"{len(data)} bytes", error.limit, remedy) from error
        for subject in subjects:
            if subject.name in self.names():
                raise refuse("name", subject.name, "that name is in use", "delete the old one first")
        return [self.save(subject) for subject in subjects]

    def delete(self, name: str) -> None:
        self.path(name).unlink()

    def copy(self, name: str, target: Path) -> dict[str, str]:
        """Copy a subject's file, so that a session does not depend on the shelf; returns name -> words."""
        data = self.path(name).read_bytes()
        write_whole(target, data)
        return {subject.name: subject.words for subject in read_cast(target)}


def subject_of(live: LiveSession, asked: NewSubject) -> Subject:
    """Cut a subject out of a session: slots of its bank, or a box of pixels at some second."""
    if (asked.slots is None) == (asked.box is None):
        raise refuse("subject", asked.name, "needs either slots or a box", "give one of the two")
    branch = live.record.current
    live.check_video(asked.track, branch)
    if asked.slots is not None:
        return _of_slots(live, asked, asked.slots, branch)
    return _of_box(live, asked, asked.box or [], branch)


def _of_slots(live: LiveSession, asked: NewSubject, slots: Sequence[int], branch: int) -> Subject:
    """Make a subject of slots: of the block from which most of them come, since a subject is seen in one block."""
    if not slots:
        raise refuse("slots", [], "at least one is needed", "name slots of the bank")
    last = live.store.count(asked.track, branch) - 1
    listed = find_listed(live, asked.track, last if asked.block is None else asked.block, slots)
    length = live.clock.spec.frames_per_block
    blocks = [frame // length for frame, _, _ in listed]
    block = max(set(blocks), key=lambda index: (blocks.count(index), index))
    mask = np.zeros((length, *live.clock.spec.grid), dtype=bool)
    for frame, row, column in listed:
        if frame // length == block:
            mask[frame - block * length, row, column] = True
    return _subject(live, asked, branch, block, mask)


def _of_box(live: LiveSession, asked: NewSubject, box: Sequence[float], branch: int) -> Subject:
    if len(box) != 4:
        limit = "must be x, y, width, height in pixels"
        raise refuse("box", list(box), limit, "for example [40, 30, 64, 64]")
    spec, second = live.clock.spec, asked.second
    end = live.clock.start_s(live.store.count(asked.track, branch))
    if second is None or not 0 <= second < end:
        raise refuse("second", second, f"the video has {end:.4g} s", "name a second of it")
    block = live.clock.block_at(second)
    frame = spec.num_frames(int(second * spec.pictures_per_second) + 1) - 1
    first = block * spec.frames_per_block
    while spec.num_pictures(frame + 1) <= second * spec.pictures_per_second:
        frame += 1
    mask = np.zeros((spec.frames_per_block, *spec.grid), dtype=bool)
    mask[min(max(frame - first, 0), spec.frames_per_block - 1)] = tokens_in_box(
        (box[0], box[1], box[2], box[3]), spec
    )
    return _subject(live, asked, branch, block, mask)


def _subject(
    live: LiveSession, asked: NewSubject, branch: int, block: int, mask: NDArray[np.bool_]
) -> Subject:
    store, spec, track = live.store, live.clock.spec, asked.track
    info = store.read_info(track, branch, block)
    trace, first = BlockTrace.from_json(info["trace"]), block * spec.frames_per_block
    pictures = decode_pictures(store.read_init(track, branch), store.read(track, branch, block, MEDIA))
    # The picture of the frame that shows most of it.
    best = int(mask.sum(axis=(1, 2)).argmax())
    index = spec.num_pictures(first + best) - spec.num_pictures(first)
    flat = np.asarray(mask[best])
    about: dict[str, str | int | float] = {
        "model": spec.name,
        "prompt": info["prompt"],
        "seed": live.tracks[track].config.seeds[0],
        "second": round(spec.num_pictures(first + best) / spec.pictures_per_second, 3),
    }
    return Subject(
        asked.name,
        asked.words or f"a {asked.name}",
        store.read_latents(track, branch, [block])[block][0],
        torch.from_numpy(mask),
        torch.from_numpy(new_scores(trace, spec)),
        cut_subject(pictures[index], flat),
        about,
    )
