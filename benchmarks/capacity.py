"""How many viewers on how many replicas? `python -m benchmarks.capacity --block-ms 310 --replicas 8 --sessions 2`

A simulation of `recap serve` by discrete events: viewers arrive, wait for a seat or are refused, watch for some
minutes and leave; the model of a replica makes one block at a time, for its sessions in turn, up to a lead beyond
what was seen; encoding and writing follow on another thread; replicas fail, come back after a while, and their
sessions move. Block times are measured ones. `--check` starts a real cluster on this machine instead, lets viewers
watch it, and prints what was measured next to what the simulation says for the block times that it reports.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import print_json


@dataclass(frozen=True)
class Setting:
    """Says what is simulated; times are in seconds."""

    replicas: int = 1
    sessions: int = 2
    block_s: float = 0.31
    # Encoding and writing a block, next to the model.
    after_s: float = 0.05
    # How long a block plays.
    play_s: float = 0.75
    lead_blocks: int = 2
    queue: int = 8
    patience_s: float = 20.0
    # Viewers that come every second, and how long they stay on average; 0 lets `sessions` a replica stay for ever.
    arrivals: float = 0.0
    stay_s: float = 300.0
    # How often a replica fails on average, how long until it is back, and how long opening a session keeps a model.
    failure_s: float = float("inf")
    back_s: float = 30.0
    open_s: float = 0.5
    # How often somebody types another prompt, on average: what was made ahead is then made again.
    prompt_s: float = 20.0
    seconds: float = 3600.0
    # How much block times vary, as a part of them.
    jitter: float = 0.05


@dataclass
class Viewer:
    """Is somebody who watches one session."""

    leaves_at: float
    replica: Replica | None = None
    # Blocks that were made, that have arrived, and that were played.
    made: int = 0
    arrived: int = 0
    played: int = 0
    playing: bool = False
    gone: bool = False
    begun_at: float | None = None
    waits_since: float | None = None
    stood_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    lost_at: float | None = None
    # Counts prompts, so that what was made for an earlier one is not shown.
    prompts: int = 0
    asked_at: float | None = None
    answers: list[float] = field(default_factory=list)


@dataclass
class Replica:
    """Is a process with one model."""

    number: int
    turn: deque[Viewer] = field(default_factory=deque)
    opening: deque[Viewer] = field(default_factory=deque)
    alive: bool = True
    busy: bool = False
    # When the thread that encodes is free.
    free_at: float = 0.0
    work_s: float = 0.0
    # Counts failures, so that what an earlier life began does not arrive.
    life: int = 0


class Simulation:
    """Runs a setting; `result` says what viewers saw."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.setting = setting
        self.now = 0.0
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._replicas = [Replica(number) for number in range(setting.replicas)]
        self._queue: deque[tuple[float, Viewer]] = deque()
        self._moving: deque[Viewer] = deque()
        self.viewers: list[Viewer] = []
        self.came = self.refused = self.blocks = 0
        self.waits: list[float] = []

    def run(self) -> dict[str, Any]:
        setting = self.setting
        if setting.arrivals:
            self._at(self._rng.expovariate(setting.arrivals), self._arrive)
        else:
            for _ in range(setting.replicas * setting.sessions):
                self._admit(Viewer(float("inf")), 0.0)
        for one in self._replicas:
            self._plan_failure(one)
        while self._events and self._events[0][0] <= setting.seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = setting.seconds
        return self.result()

    def result(self) -> dict[str, Any]:
        seen = [viewer for viewer in self.viewers if viewer.begun_at is not None]
        stood = sum(
            v.stood_s + (self.now - v.waits_since if v.waits_since is not None else 0.0) for v in seen
        )
        watched = sum(min(v.leaves_at, self.now) - (v.begun_at or 0.0) for v in seen)
        pauses = sorted(pause for viewer in self.viewers for pause in viewer.pauses)
        answers = sorted(answer for viewer in self.viewers for answer in viewer.answers)
        return {
            "viewers": len(self.viewers),
            "refused": round(self.refused / max(1, self.came), 4),
            "wait_s": round(statistics.mean(self.waits), 3) if self.waits else 0.0,
            "playing": round(1 - stood / watched, 4) if watched else 0.0,
            "blocks_per_s": round(self.blocks / self.now, 3),
            "busy": round(sum(r.work_s for r in self._replicas) / self.now / len(self._replicas), 4),
            "prompt_s": round(statistics.median(answers), 3) if answers else 0.0,
            "prompt_95_s": round(answers[int(0.95 * len(answers))], 3) if answers else 0.0,
            "pauses": len(pauses),
            "pause_s": round(statistics.median(pauses), 3) if pauses else 0.0,
            "longest_pause_s": round(pauses[-1], 3) if pauses else 0.0,
        }

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), act))

    # Coming and going

    def _arrive(self) -> None:
        setting = self.setting
        self._at(self._rng.expovariate(setting.arrivals), self._arrive)
        self.came += 1
        viewer = Viewer(self._rng.expovariate(1 / setting.stay_s))
        if self._free() is not None:
            self._admit(viewer, 0.0)
        elif len(self._queue) >= setting.queue:
            self.refused += 1
        else:
            entry = (self.now, viewer)
            self._queue.append(entry)
            self._at(setting.patience_s, lambda: self._give_up(entry))

    def _give_up(self, entry: tuple[float, Viewer]) -> None:
        if entry in self._queue:
            self._queue.remove(entry)
            self.refused += 1

    def _free(self) -> Replica | None:
        """Return the replica with the fewest sessions that has a seat."""
        room = [r for r in self._replicas if r.alive and self._held(r) < self.setting.sessions]
        return min(room, key=self._held) if room else None

    @staticmethod
    def _held(one: Replica) -> int:
        return len(one.turn) + len(one.opening)

    def _admit(self, viewer: Viewer, waited_s: float) -> None:
        self.viewers.append(viewer)
        self.waits.append(waited_s)
        viewer.leaves_at += self.now
        if viewer.leaves_at < float("inf"):
            self._at(viewer.leaves_at - self.now, lambda: self._leave(viewer))
        self._seat(viewer)

    def _seat(self, viewer: Viewer) -> None:
        place = self._free()
        assert place is not None
        viewer.replica = place
        place.opening.append(viewer)
        self._work(place)

    def _leave(self, viewer: Viewer) -> None:
        viewer.gone = True
        if viewer.waits_since is not None:
            viewer.stood_s += self.now - viewer.waits_since
            viewer.waits_since = None
        if (place := viewer.replica) is not None:
            for queue in (place.turn, place.opening):
                if viewer in queue:
                    queue.remove(viewer)
        if viewer in self._moving:
            self._moving.remove(viewer)
        self._fill()

    def _fill(self) -> None:
        """Seat those who wait, sessions that lost their replica first."""
        while self._moving and self._free() is not None:
            self._seat(self._moving.popleft())
        while self._queue and self._free() is not None:
            since, viewer = self._queue.popleft()
            self._admit(viewer, self.now - since)

    # Generating

    def _work(self, place: Replica) -> None:
        """Let the model do the next thing: open a session, or make a block for the next one who wants it."""
        if place.busy or not place.alive:
            return
        life = place.life
        if place.opening:
            viewer = place.opening.popleft()
            place.busy = True
            place.turn.append(viewer)
            self._at(self.setting.open_s, lambda: self._opened(place, viewer, life))
            return
        wanting = [v for v in place.turn if v.made - v.played < self.setting.lead_blocks + v.playing]
        if wanting:
            viewer = wanting[0]
            place.turn.remove(viewer)
            place.turn.append(viewer)
            spent = self.setting.block_s * max(0.1, self._rng.gauss(1.0, self.setting.jitter))
            place.busy = True
            viewer.made += 1
            place.work_s += spent
            prompts = viewer.prompts
            self._at(spent, lambda: self._made(place, viewer, life, prompts))

    def _opened(self, place: Replica, viewer: Viewer, life: int) -> None:
        if place.life == life:
            # What was made but had not arrived is made again.
            viewer.made = viewer.arrived
            place.busy = False
            self._work(place)

    def _made(self, place: Replica, viewer: Viewer, life: int, prompts: int) -> None:
        if place.life != life:
            return
        place.busy = False
        self.blocks += 1
        place.free_at = max(self.now, place.free_at) + self.setting.after_s
        self._at(place.free_at - self.now, lambda: self._arrived(place, viewer, life, prompts))
        self._work(place)

    def _arrived(self, place: Replica, viewer: Viewer, life: int, prompts: int) -> None:
        if place.life != life or viewer.gone or viewer.prompts != prompts:
            return
        viewer.arrived += 1
        if viewer.asked_at is not None:
            viewer.answers.append(self.now - viewer.asked_at)
            viewer.asked_at = None
        if viewer.lost_at is not None:
            viewer.pauses.append(self.now - viewer.lost_at)
            viewer.lost_at = None
        if viewer.begun_at is None:
            viewer.begun_at = self.now
            self._plan_prompt(viewer)
        if not viewer.playing:
            self._play(viewer)

    def _play(self, viewer: Viewer) -> None:
        """Show the next block if it is there, or stand still."""
        if viewer.gone:
            return
        if viewer.waits_since is not None:
            viewer.stood_s += self.now - viewer.waits_since
            viewer.waits_since = None
        viewer.playing = viewer.arrived > viewer.played
        if not viewer.playing:
            viewer.waits_since = self.now
            return
        self._at(self.setting.play_s, lambda: self._played(viewer))
        if viewer.replica is not None:
            self._work(viewer.replica)

    def _played(self, viewer: Viewer) -> None:
        viewer.played += 1
        self._play(viewer)

    def _plan_prompt(self, viewer: Viewer) -> None:
        if self.setting.prompt_s < float("inf"):
            self._at(self._rng.expovariate(1 / self.setting.prompt_s), lambda: self._prompt(viewer))

    def _prompt(self, viewer: Viewer) -> None:
        """Drop what nobody has seen; the next block is under the new prompt."""
        if viewer.gone:
            return
        self._plan_prompt(viewer)
        viewer.prompts += 1
        viewer.made = viewer.arrived = viewer.played + viewer.playing
        viewer.asked_at = self.now
        if viewer.replica is not None:
            self._work(viewer.replica)

    # Failing

    def _plan_failure(self, place: Replica) -> None:
        if self.setting.failure_s < float("inf"):
            self._at(self._rng.expovariate(1 / self.setting.failure_s), lambda: self._fail(place))

    def _fail(self, place: Replica) -> None:
        place.alive = place.busy = False
        place.life += 1
        for viewer in (*place.turn, *place.opening):
            viewer.lost_at = self.now if viewer.lost_at is None else viewer.lost_at
            viewer.replica = None
            self._moving.append(viewer)
        place.turn.clear()
        place.opening.clear()
        self._at(self.setting.back_s, lambda: self._come_back(place))
        self._fill()

    def _come_back(self, place: Replica) -> None:
        place.alive, place.free_at = True, self.now
        self._plan_failure(place)
        self._fill()


def main() -> None:
    """Print what the simulation says, or how it compares with a cluster here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-ms", type=float, default=310.0, help="of the model, measured")
    parser.add_argument("--after-ms", type=float, default=50.0, help="of encoding and writing a block")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=2, help="seats of a replica")
    parser.add_argument(
        "--arrivals", type=float, default=0.0, help="viewers a minute; 0 fills all seats for ever"
    )
    parser.add_argument("--stay", type=float, default=5.0, help="minutes a viewer stays, on average")
    parser.add_argument(
        "--failure-hours", type=float, default=0.0, help="between failures of a replica; 0 is never"
    )
    parser.add_argument("--back", type=float, default=30.0, help="seconds until a failed replica is back")
    parser.add_argument("--hours", type=float, default=24.0, help="that are simulated")
    parser.add_argument(
        "--check", type=int, nargs="*", help="measure a cluster here, with so many viewers each"
    )
    parser.add_argument("--backbone", default="untrained", help="of the cluster here")
    options = parser.parse_args()
    if options.check is not None:
        from benchmarks.capacity_check import check

        print_json("capacity-check", "cpu", check(options.check or [2, 8], options.backbone))
        return
    setting = Setting(
        replicas=options.replicas,
        sessions=options.sessions,
        block_s=options.block_ms / 1e3,
        after_s=options.after_ms / 1e3,
        arrivals=options.arrivals / 60,
        stay_s=options.stay * 60,
        failure_s=options.failure_hours * 3600 or float("inf"),
        back_s=options.back,
        seconds=options.hours * 3600,
    )
    found = Simulation(setting).run()
    for name, value in found.items():
        print(f"{name:16} {value}")
    print_json("capacity", "simulation", found)


if __name__ == "__main__":
    main()
