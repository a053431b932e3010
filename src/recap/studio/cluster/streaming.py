"""This module relays a viewer's stream: it stays open when the session's replica dies, and continues from another."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from recap.errors import RecapError, refuse
from recap.studio.cluster.directory import Directory
from recap.studio.cluster.seats import Busy, Seat
from recap.studio.hub import error_event

MOVING = {
    "v": 1,
    "type": "status",
    "state": "paused",
    "rate": None,
    "message": "the machine that generated this is gone; the session moves to another one",
}
ENDED, NOT_FOUND, LATER = 1001, 1008, 1013
"""Codes with which a stream is closed: it ended, there is nothing to come back to, or there may be later."""

AGAIN_S = 0.1


class Relay:
    """Passes messages between one viewer and the replica of a session."""

    def __init__(self, directory: Directory, socket: Any, name: str, pauses: list[float]) -> None:
        self._directory = directory
        self._socket = socket
        self._name = name
        self._pauses = pauses
        # Marks of messages that have no answer yet.
        self._open: dict[str, None] = {}
        self._received = asyncio.Queue[str | bytes](256)
        # When the replica was lost; None after the hello of the next one.
        self._lost_at: float | None = None

    async def run(self) -> None:
        """Relay until the viewer leaves or the session ends."""
        listening = asyncio.create_task(self._listen())
        try:
            while not listening.done():
                try:
                    seat = await self._directory.find(self._name)
                except RecapError as error:
                    await self._socket.send_text(json.dumps(error_event(error)))
                    await self._socket.close(LATER if isinstance(error, Busy) else NOT_FOUND)
                    return
                seat.watchers += 1
                try:
                    ended = await self._relay(seat, listening)
                finally:
                    seat.watchers -= 1
                    seat.used = time.monotonic()
                if ended is not None:
                    await self._socket.close(ended)
                    return
                if not listening.done():
                    await self._report_loss()
                    await asyncio.sleep(AGAIN_S)
        except RuntimeError:
            # The viewer left while something was sent.
            pass
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> None:
        """Queue the viewer's messages, in order, also while the session moves."""
        with suppress(RuntimeError):
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._received.put(message.get("text") or message.get("bytes") or b"")

    async def _relay(self, seat: Seat, listening: asyncio.Task[None]) -> int | None:
        """Relay while the replica lives; returns the code with which it ended the stream, None if it was lost."""
        import aiohttp

        try:
            async with self._directory.connect(seat, f"/v1/sessions/{self._name}/stream") as replica:
                down = asyncio.create_task(self._pass_on(replica))
                up = asyncio.create_task(self._pass_back(replica))
                gone = asyncio.create_task(seat.gone.wait())
                tasks = {down, up, gone, listening}
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (down, up, gone):
                        task.cancel()
                    await asyncio.gather(down, up, gone, return_exceptions=True)
                if listening.done() or seat.gone.is_set():
                    return None
                # Other codes are those of broken connections.
                return replica.close_code if replica.close_code in (ENDED, NOT_FOUND) else None
        except (aiohttp.ClientConnectionError, OSError, asyncio.TimeoutError):
            # The replica does not answer; Ray may need some time to notice that a machine is gone.
            seat.leave()
            return None
        except aiohttp.ClientError:
            return LATER

    async def _pass_on(self, replica: Any) -> None:
        async for message in replica:
            if isinstance(message.data, bytes):
                await self._socket.send_bytes(message.data)
                continue
            if not isinstance(message.data, str):
                # A broken connection yields an exception instead of a text.
                return
            text = message.data
            if self._lost_at is not None and '"type": "hello"' in text[:40]:
                self._pauses.append(time.monotonic() - self._lost_at)
                self._lost_at = None
            if self._open and ('"type": "done"' in text[:40] or '"type": "error"' in text[:40]):
                self._open.pop(json.loads(text).get("id", ""), None)
            await self._socket.send_text(text)

    async def _pass_back(self, replica: Any) -> None:
        while True:
            message = await self._received.get()
            self._note(message)
            if isinstance(message, bytes):
                await replica.send_bytes(message)
            else:
                await replica.send_str(message)

    def _note(self, message: str | bytes) -> None:
        """Remember what has no answer yet, and whether the session was paused."""
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            plain = json.loads(message)
            kind, mark = plain.get("type"), plain.get("id")
            note_pause(self._directory, self._name, kind)
            if kind != "playhead" and isinstance(mark, str) and mark and len(self._open) < 1000:
                self._open[mark[:200]] = None

    async def _report_loss(self) -> None:
        """Send the viewer what happened: the picture waits, and unanswered commands may have to be sent again."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            await self._socket.send_text(json.dumps(MOVING))
        for mark in self._open:
            limit = "its machine was lost before it answered, so it may have happened or not"
            remedy = "look at the timeline, and send it again if it is not there"
            error = refuse("command", mark, limit, remedy)
            await self._socket.send_text(json.dumps(error_event(error, mark)))
        self._open.clear()


def note_pause(directory: Directory, name: str, kind: object) -> None:
    """Remember whether a client paused a session."""
    if kind == "pause":
        directory.paused.add(name)
    elif kind == "play":
        directory.paused.discard(name)
