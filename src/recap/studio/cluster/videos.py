"""This module makes videos for programs on a cluster: the front stores them, and replicas generate them.

A video takes a seat while it is generated. A replica that dies with it costs time and nothing else: it is generated
again elsewhere, to the same bits. So is one that was not finished when the front ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from recap.errors import RecapError
from recap.studio.cluster.directory import Answer, Directory, Lost, error_of
from recap.studio.cluster.seats import Busy, Seat
from recap.studio.messages import NewVideo
from recap.studio.settings import Limits
from recap.studio.store import new_id
from recap.studio.videos import ABOUT, RESULT, Video, check_room, find_video

VIDEOS = "videos"
POLL_S = 0.3
"""Seconds between two requests for the progress of a video."""

SEAT_S = 600.0
"""How long a video waits for a seat before it asks again."""


class VideoDesk:
    """Manages the videos of a cluster; everything here runs on the event loop of the front."""

    def __init__(self, directory: Directory, limits: Limits, replicas: int) -> None:
        self._directory = directory
        self._store = directory.store
        self._limits = limits
        self._videos: dict[str, Video] = {}
        # As replicas report it, in percent.
        self._progress: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # A replica generates one video at a time.
        self._turns = asyncio.Semaphore(replicas)

    async def load(self) -> None:
        """Find the videos of an earlier front, and continue those that were not finished."""
        for name in await asyncio.to_thread(self._store.children, VIDEOS):
            data = await asyncio.to_thread(self._store.read, f"{VIDEOS}/{name}/{ABOUT}")
            if data is not None and (video := Video.from_json(name, data)) is not None:
                self._videos[name] = video
        for video in sorted(self._videos.values(), key=lambda each: each.created):
            if video.is_open:
                self._start(video)

    async def close(self) -> None:
        """Stop; what is not finished is in the store, and the next front continues it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Return how many videos are not finished."""
        return sum(video.is_open for video in self._videos.values())

    async def create(self, asked: NewVideo) -> dict[str, Any]:
        """Queue a checked video; refuses more than may wait."""
        check_room(asked, self._videos.values(), self._limits)
        video = Video(new_id(), time.time(), asked)
        self._videos[video.id] = video
        try:
            await self._write(video)
        except BaseException:
            del self._videos[video.id]
            raise
        self._start(video)
        return self.shown(video.id)

    def list(self) -> list[dict[str, Any]]:
        return [self.shown(name) for name in self._videos]

    def shown(self, name: str) -> dict[str, Any]:
        """Describe a video and its progress."""
        video = find_video(self._videos, name)
        return {
            **video.shown(),
            "progress": 100 if video.status == "completed" else self._progress.get(name, 0),
        }

    async def content(self, name: str) -> bytes:
        """Return the file of a finished video."""
        find_video(self._videos, name, done=True)
        data = await asyncio.to_thread(self._store.read, f"{VIDEOS}/{name}/{RESULT}")
        return data or b""

    async def delete(self, name: str) -> None:
        """Delete a video, or stop it."""
        find_video(self._videos, name)
        del self._videos[name]
        if (task := self._tasks.get(name)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # The record goes first, so that half a video is not offered.
        await asyncio.to_thread(self._store.delete, f"{VIDEOS}/{name}/{ABOUT}")
        await asyncio.to_thread(self._store.delete_all, f"{VIDEOS}/{name}")

    async def _write(self, video: Video) -> None:
        await asyncio.to_thread(self._store.write, f"{VIDEOS}/{video.id}/{ABOUT}", video.to_json())

    # Generating

    def _start(self, video: Video) -> None:
        self._tasks[video.id] = asyncio.create_task(self._make(video))

    async def _make(self, video: Video) -> None:
        """Generate a video, on one replica after another if some are lost, and store it."""
        try:
            async with self._turns:
                data = await self._generate(video)
                await asyncio.to_thread(self._store.write, f"{VIDEOS}/{video.id}/{RESULT}", data)
                video.status = "completed"
                await self._write(video)
        except (RecapError, OSError) as error:
            video.status, video.error = "failed", str(error)
            await self._write(video)
        finally:
            self._tasks.pop(video.id, None)
            self._progress.pop(video.id, None)

    async def _generate(self, video: Video) -> bytes:
        while True:
            try:
                seat = await self._directory.take(SEAT_S, insist=True)
            except Busy:
                continue
            with _seated(seat):
                try:
                    return await self._generate_on(seat, video)
                except Lost:
                    video.status = "queued"

    async def _generate_on(self, seat: Seat, video: Video) -> bytes:
        """Let a replica generate a video under a name of its own; returns the file."""
        body = json.dumps(dataclasses.asdict(video.asked)).encode()
        there = json.loads(await self._ask(seat, "POST", "", body))["id"]
        video.status = "in_progress"
        try:
            while True:
                answer = json.loads(await self._ask(seat, "GET", f"/{there}"))
                self._progress[video.id] = answer["progress"]
                if answer["status"] == "completed":
                    return await self._ask(seat, "GET", f"/{there}/content")
                if answer["status"] == "failed":
                    raise RecapError(answer["error"])
                await asyncio.sleep(POLL_S)
        finally:
            # Also where a client deletes the video meanwhile: the replica stops after its block.
            with suppress(Lost, RecapError):
                await self._ask(seat, "DELETE", f"/{there}")

    async def _ask(self, seat: Seat, method: str, path: str, body: bytes = b"") -> bytes:
        answer: Answer = await self._directory.send(seat, method, f"/v1/videos{path}", body)
        if answer[0] >= 400:
            raise error_of(answer[1])
        return answer[1]


@contextmanager
def _seated(seat: Seat) -> Iterator[None]:
    try:
        yield
    finally:
        seat.leave()
