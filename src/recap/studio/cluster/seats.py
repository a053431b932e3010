"""A seat is a request to Ray Serve that lasts as long as a session is open on a replica."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from recap.errors import RecapError, refuse

AGAIN_S = 0.25
"""How long a request that was turned away waits before the next try."""

MUTE_S = 5.0
"""How long a session that moves waits for an answer: the asked machine may be gone as well."""


class Busy(RecapError):
    """Means that there is no seat now; later there may be one."""


class ServeSeating:
    """Gives seats on the replicas of a deployment on Ray Serve."""

    def __init__(self, handle: Any) -> None:
        from ray.serve.exceptions import BackPressureError

        self._handle = handle
        self._refusal = BackPressureError

    def ask(self) -> Any:
        """Ask for a seat by a request that lasts: its first answer names the replica, its end means that it is gone.

        Cancelling the request releases the seat.
        """
        return self._handle.options(stream=True).seat.remote()

    def is_refusal(self, error: BaseException) -> bool:
        """Tell whether an error means that too many wait already."""
        return isinstance(error, self._refusal)


class Seat:
    """Reserves room for one session on a replica; `gone` is set when the replica is lost or the seat is released."""

    def __init__(self, request: Any, address: str) -> None:
        self.address = address
        self.gone = asyncio.Event()
        self.watchers = 0
        self.used = time.monotonic()
        self._request = request
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        # The seat ends with the request, however that ended.
        with suppress(Exception, asyncio.CancelledError):
            await anext(self._request)
        self.gone.set()

    @property
    def idle_s(self) -> float:
        """Return how long the session has had no viewer and no request."""
        return 0.0 if self.watchers else time.monotonic() - self.used

    def leave(self) -> None:
        """Release the seat."""
        self.gone.set()
        self._request.cancel()


class Seats:
    """Takes seats, and explains why there is none."""

    def __init__(self, seating: ServeSeating, total: int, queue: int) -> None:
        self._seating = seating
        self._total = total
        self._queue = queue
        self.waiting = 0
        self.refused = 0

    async def take(self, patience_s: float, *, insist: bool = False) -> Seat:
        """Take a seat, or wait for one; with `insist` it is not refused because others wait too."""
        end = time.monotonic() + patience_s
        why = f"all {self._total} seats are taken"
        self.waiting += 1
        try:
            while (left := end - time.monotonic()) > 0:
                request = self._seating.ask()
                try:
                    first = await asyncio.wait_for(anext(request), min(left, MUTE_S) if insist else left)
                except asyncio.TimeoutError:
                    request.cancel()
                    continue
                except asyncio.CancelledError:
                    request.cancel()
                    raise
                except Exception as error:
                    # A replica that died before it answered is no refusal.
                    if self._seating.is_refusal(error) and not insist:
                        why += f", and {self._queue} wait already"
                        break
                    await asyncio.sleep(AGAIN_S)
                    continue
                if "address" in first:
                    return Seat(request, first["address"])
                why = first["full"]
                request.cancel()
                await asyncio.sleep(AGAIN_S)
        finally:
            self.waiting -= 1
        self.refused += 1
        raise busy(why)


def busy(why: str) -> Busy:
    """Make the error about a missing seat."""
    plain = refuse("sessions", "full", why, "try again in a minute, or close a session")
    error = Busy(str(plain))
    error.field, error.value, error.limit, error.remedy = plain.field, plain.value, plain.limit, plain.remedy
    return error
