"""This module makes videos for programs, which request, poll and download them; they take turns with sessions."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from recap.errors import RecapError, refuse
from recap.io.files import write_whole
from recap.plan import make_plan
from recap.session import Session
from recap.studio.engine import Engine, Requests, as_refusal
from recap.studio.messages import NewVideo
from recap.studio.segments import Pictures, encode_block, join_segments
from recap.studio.settings import Limits
from recap.studio.store import ID, new_id
from recap.studio.track import Clock, pictures_of

ABOUT, RESULT = "video.json", "video.mp4"
MakeSession = Callable[[NewVideo, Path], Session]


@dataclass(slots=True)
class Video:
    """Describes a requested video."""

    id: str
    created: float
    asked: NewVideo
    status: str = "queued"
    done: int = 0
    blocks: int = 0
    error: str = ""

    @property
    def is_open(self) -> bool:
        return self.status in ("queued", "in_progress")

    def shown(self) -> dict[str, Any]:
        """Return what clients see of it."""
        progress = 100 if self.status == "completed" else round(100 * self.done / max(1, self.blocks + 1))
        asked = {
            name: value for name, value in dataclasses.asdict(self.asked).items() if name not in ("v", "id")
        }
        about = {"id": self.id, "object": "video", "created": self.created, "status": self.status}
        return {"v": 1, **about, "progress": progress, "error": self.error or None, **asked}

    def to_json(self) -> bytes:
        """Return what is stored of it besides its file."""
        plain = {"created": self.created, "asked": dataclasses.asdict(self.asked)}
        return json.dumps({**plain, "status": self.status, "error": self.error}).encode()

    @classmethod
    def from_json(cls, name: str, data: bytes) -> Video | None:
        """Return a video that was kept; an unfinished one is queued again, and None means damaged."""
        try:
            plain = json.loads(data)
            asked, status = NewVideo(**plain["asked"]), str(plain["status"])
            video = cls(name, float(plain["created"]), asked, status, error=str(plain.get("error", "")))
        except (ValueError, KeyError, TypeError):
            return None
        video.status = "queued" if video.is_open else status
        return video if ID.fullmatch(name) else None


def check_room(asked: NewVideo, videos: Iterable[Video], limits: Limits) -> None:
    """Refuse a video that is too long, or more videos than may wait or be kept."""
    if not 0 < asked.seconds <= limits.video_seconds:
        limit = f"must be above 0 and at most {limits.video_seconds:g}"
        raise refuse("seconds", asked.seconds, limit, "ask for less, or begin a session")
    kept = list(videos)
    waiting = sum(video.is_open for video in kept)
    if waiting >= limits.waiting_videos:
        limit = f"{waiting} videos wait, and at most {limits.waiting_videos} may"
        raise refuse("videos", waiting, limit, "ask again when one is done")
    if len(kept) >= limits.kept_videos:
        raise refuse("videos", len(kept), f"at most {limits.kept_videos} are kept", "delete one of them")


def find_video(videos: Mapping[str, Video], name: str, *, done: bool = False) -> Video:
    """Return a video of this name, with `done` only a finished one; refuses any other."""
    if name not in videos:
        raise refuse("video", name[:60], "there is no such video", "GET /v1/videos lists them")
    video = videos[name]
    if done and video.status != "completed":
        limit = f"it is {video.status}" + (f": {video.error}" if video.error else "")
        raise refuse("video", name, limit, "ask again later" if video.is_open else "ask for it again")
    return video


class VideoQueue:
    """Keeps the videos of a studio; a performer on the model's thread, which works on the oldest open one."""

    def __init__(self, folder: Path, engine: Engine, limits: Limits, make_session: MakeSession) -> None:
        self._folder = folder
        self._engine = engine
        self._limits = limits
        self._make_session = make_session
        self._lock = RLock()
        self._videos: dict[str, Video] = {}
        # What is generated at present, with the session that does it and its encoded blocks.
        self._present: tuple[Video, Session] | None = None
        self._pieces: list[bytes] = []
        self._init = b""
        for path in sorted(folder.glob(f"*/{ABOUT}"), key=lambda path: path.stat().st_mtime):
            self._load(path)

    def _load(self, path: Path) -> None:
        """Read a video of an earlier server; one that was not finished is generated again, to the same bits."""
        with suppress(OSError):
            if video := Video.from_json(path.parent.name, path.read_bytes()):
                self._videos[video.id] = video

    def create(self, asked: NewVideo) -> dict[str, Any]:
        """Queue a video; refuses more than may wait."""
        with self._lock:
            check_room(asked, self._videos.values(), self._limits)
            video = Video(new_id(), time.time(), asked)
            self._videos[video.id] = video
            self._write(video)
        self._wake()
        return video.shown()

    def list(self) -> list[dict[str, Any]]:
        with self._lock:
            return [video.shown() for video in self._videos.values()]

    def find(self, name: str) -> Video:
        with self._lock:
            return find_video(self._videos, name)

    def content(self, name: str) -> bytes:
        """Return the file of a finished video."""
        with self._lock:
            find_video(self._videos, name, done=True)
        return (self._folder / name / RESULT).read_bytes()

    def delete(self, name: str) -> None:
        """Delete a video; one that is generated at present is stopped after its block."""
        self.find(name)
        with self._lock:
            del self._videos[name]
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _write(self, video: Video) -> None:
        write_whole(self._folder / video.id / ABOUT, video.to_json())

    # On the model's thread

    def _next(self) -> Video | None:
        with self._lock:
            return next((video for video in self._videos.values() if video.is_open), None)

    def wants_block(self) -> bool:
        video = self._next()
        if video is None:
            self._present = None
            return False
        # The last block is with the encoder, which ends the video.
        return self._present is None or self._present[0] is not video or video.done < video.blocks

    def make_block(self) -> Requests:
        video = self._next()
        if video is None:
            return
        if self._present is None or self._present[0] is not video:
            session = self._make_session(video.asked, self._folder / video.id)
            plan = make_plan([session.config.shots], session.backbone.spec)
            video.status, video.done, video.blocks = "in_progress", 0, len(plan.blocks)
            self._present, self._pieces = (video, session), []
        session = self._present[1]
        made = yield session
        video.done += 1
        clock = Clock(session.backbone.spec)
        self._engine.encoder.submit(self._encode, video, made.block.index, pictures_of(made), clock)

    def _encode(self, video: Video, index: int, pictures: Pictures, clock: Clock) -> None:
        """Encode a block, and after the last one write the video; on the encoder's thread."""
        try:
            rate = clock.spec.pictures_per_second
            coded = encode_block(pictures, rate, clock.first_picture(index), index)
            if index == 0:
                self._pieces, self._init = [], coded.init
            self._pieces.append(coded.media)
            with self._lock:
                if index + 1 == video.blocks and video.id in self._videos:
                    join_segments(self._init, self._pieces, self._folder / video.id / RESULT)
                    video.status, self._pieces = "completed", []
                    self._write(video)
            if not video.is_open:
                self._wake()
        except Exception as error:
            self._end(video, as_refusal(error))

    def fail(self, error: RecapError) -> None:
        video = self._next()
        if video is not None:
            self._end(video, error)

    def _end(self, video: Video, error: RecapError) -> None:
        with self._lock:
            video.status, video.error = "failed", str(error)
            if video.id in self._videos:
                # Where the disk is full, the failure is known only until this server ends.
                with suppress(OSError):
                    self._write(video)
        self._wake()

    def _wake(self) -> None:
        """Wake the model's thread, in case another video waits, unless the studio is closing."""
        with suppress(RecapError):
            self._engine.call(lambda: None)
