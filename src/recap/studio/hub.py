"""The hub sends the events of a session to all subscribers; one that is too slow is dropped, and can reconnect."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from recap.errors import RecapError, refuse

WAITING_EVENTS = 512
"""How many events may wait for a subscriber: at a few a second, minutes without reading."""

Event = str | bytes


def binary_event(header: dict[str, Any], data: bytes) -> bytes:
    """Return a binary message: the length of a header of JSON in 4 bytes, the header, the bytes."""
    head = json.dumps(header).encode()
    return struct.pack(">I", len(head)) + head + data


def error_event(error: RecapError, mark: str = "") -> dict[str, Any]:
    """Return the event about a refusal, with all parts of its message."""
    parts = {name: getattr(error, name) for name in ("field", "value", "limit", "remedy")}
    return {"v": 1, "type": "error", "id": mark, **parts, "text": str(error)}


class Subscriber:
    """Queues the events for one viewer in the event loop of the server; the queue is bounded."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue(WAITING_EVENTS)
        # Track and branch of the videos whose beginning was sent.
        self.begun: set[tuple[str, int]] = set()

    def offer(self, event: Event | None) -> None:
        """Add an event, from any thread; None ends the stream."""
        # A closed loop has no readers.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event | None) -> None:
        if self._queue.full():
            # The subscriber is too slow: one of its events makes room for the end of the stream.
            self._queue.get_nowait()
            event = None
        self._queue.put_nowait(event)

    async def next(self) -> Event | None:
        """Return the next event; None when the stream has ended."""
        return await self._queue.get()


class Hub:
    """Has the subscribers of one session; callers hold the session's lock, so that events stay in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._subscribers: list[Subscriber] = []

    def __len__(self) -> int:
        return len(self._subscribers)

    def join(self, subscriber: Subscriber) -> None:
        if len(self._subscribers) >= self._most:
            limit = f"a session has at most {self._most} subscribers"
            raise refuse("subscribers", len(self._subscribers), limit, "close another tab")
        self._subscribers.append(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a subscriber, at any time: nothing waits for this."""
        with suppress(ValueError):
            self._subscribers.remove(subscriber)

    def publish(self, event: dict[str, Any]) -> None:
        """Send an event as JSON to all."""
        text = json.dumps({"v": 1, **event})
        for subscriber in tuple(self._subscribers):
            subscriber.offer(text)

    def send_media(self, header: dict[str, Any], media: bytes, init: Callable[[], bytes]) -> None:
        """Send a piece of video to all, and the beginning first where it was not sent yet."""
        piece = binary_event({**header, "kind": "media"}, media)
        for subscriber in tuple(self._subscribers):
            self.begin(subscriber, header, init)
            subscriber.offer(piece)

    def begin(self, subscriber: Subscriber, header: dict[str, Any], init: Callable[[], bytes]) -> None:
        """Send the beginning of a video to a subscriber, unless it was sent before."""
        video = (header["track"], header["branch"])
        if video not in subscriber.begun:
            subscriber.begun.add(video)
            subscriber.offer(binary_event({**header, "kind": "init"}, init()))

    def close(self) -> None:
        """End all streams."""
        for subscriber in tuple(self._subscribers):
            subscriber.offer(None)
        self._subscribers.clear()
