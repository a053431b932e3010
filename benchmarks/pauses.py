"""How long does the picture stand still when a replica is killed? `python -m benchmarks.pauses --kills 10`

It starts `recap serve` on this machine, lets people watch in real time, and kills a replica by SIGKILL now and then.
Of everybody whose session was there it prints the seconds from the kill to the next `hello`, to the next block, and
how long the picture stood still: what was there already plays on meanwhile. With as many `--seats` as `--viewers`
the other replicas have room for all; with fewer, some wait until the killed one is back. The load is printed, since
on busy cores it decides; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.studio import TICK_S, Viewer, start_server
from benchmarks.timing import print_json

PROMPT = "a fox on a beach by day"
LONGEST_S = 600.0


def replica_processes(server: int) -> list[int]:
    """Return the processes of replicas that a process started, or one that it started."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and b"ServeReplica:recap" in (place / "cmdline").read_bytes():
                found += [int(place.name)] if server in _ancestors(int(place.name)) else []
        except OSError:
            # It ended meanwhile.
            continue
    return found


def _ancestors(process: int) -> list[int]:
    found = []
    while process > 1:
        process = int(_status(process)[1])
        found.append(process)
    return found


def _status(process: int) -> list[str]:
    """Return what the kernel says of a process: its state, its parent, and so on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _work(server: int) -> dict[int, int]:
    """Return how long each replica has computed, in ticks."""
    return {process: sum(map(int, _status(process)[11:13])) for process in replica_processes(server)}


class MovedViewer(Viewer):
    """Watches a session, and notes what happens after a replica was killed."""

    def __init__(self, address: str, prompt: str) -> None:
        # By kind of event, when the first came.
        self.first_s: dict[str, float] = {}
        # How long the picture had stood still when the next block came.
        self.still_s = 0.0
        super().__init__(address, prompt)

    def take(self, event: dict[str, Any]) -> None:
        super().take(event)
        kind, now = event["type"], time.perf_counter()
        if kind == "status" and "moves to another" in event["message"]:
            self.first_s.setdefault("moves", now)
        elif kind in ("hello", "block") and "moves" in self.first_s and kind not in self.first_s:
            self.first_s[kind], self.still_s = now, self.waited_s
        if kind == "hello" and event["blocks"]["main"]:
            self.there_s = max(self.there_s, event["blocks"]["main"][-1]["end_s"])


def play(people: list[MovedViewer], seconds: float, ended: Callable[[], bool] = lambda: False) -> None:
    """Let people watch for some seconds, or until something is so."""
    began = last = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds and not ended():
        for person in people:
            person.tick(now - last)
        last = now
        time.sleep(TICK_S)


def kill_one(server: int, people: list[MovedViewer]) -> dict[str, list[float]]:
    """Kill a replica and wait until everybody who was there sees a new block; returns the seconds of each."""
    before = _work(server)
    play(people, 3.0)
    after = _work(server)
    # One that nobody watches does not compute, and is not missed.
    victim = max(after, key=lambda process: after[process] - before.get(process, after[process]))
    for person in people:
        person.first_s.clear()
    still = [person.waited_s for person in people]
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    # Everybody who was on the replica has had the message by now.
    play(people, 2.0)
    lost = [number for number, person in enumerate(people) if "moves" in person.first_s]
    play(people, LONGEST_S, lambda: all("block" in people[number].first_s for number in lost))
    times = [people[number].first_s for number in lost]
    if not all("block" in one for one in times):
        raise SystemExit(f"a session did not continue within {LONGEST_S:.0f} s")
    return {
        "hello_s": [one["hello"] - began for one in times],
        "block_s": [one["block"] - began for one in times],
        "still_s": [people[number].still_s - still[number] for number in lost],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Kill replicas of a cluster; returns all pauses."""
    found, loads = dict[str, list[float]](hello_s=[], block_s=[], still_s=[]), []
    words = ("--backbone", options.backbone, "--replicas", str(options.replicas), "--cpus", "1")
    with tempfile.TemporaryDirectory() as store:
        seats = ("--sessions", str(options.seats or options.viewers))
        process, address = start_server("serve", "--store", store, *words, *seats)
        try:
            people = [MovedViewer(address, PROMPT) for _ in range(options.viewers)]
            for number in range(options.kills):
                play(people, options.settle)
                loads.append(os.getloadavg()[0])
                pauses = kill_one(process.pid, people)
                for name, seconds in pauses.items():
                    found[name] += seconds
                shown = ", ".join(f"{name} {[round(one, 1) for one in of]}" for name, of in pauses.items())
                print(f"kill {number}, load {loads[-1]:.1f}: {shown}", flush=True)
        finally:
            process.terminate()
            process.wait(60)
    return {"loads": loads, **found}


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--viewers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seats", type=int, default=0, help="of a replica; 0 has room for all viewers")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before each kill")
    parser.add_argument("--backbone", default="embedded")
    options = parser.parse_args()
    if min(options.kills, options.viewers, options.replicas) < 1 or min(options.seats, options.settle) < 0:
        parser.error("--kills, --viewers and --replicas must be 1 or more, --seats and --settle 0 or more")
    found = measure(options)
    for name, what in (("hello_s", "hello"), ("block_s", "the next block"), ("still_s", "picture still")):
        if seconds := found[name]:
            print(f"{what}: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
    print(f"{len(found['block_s'])} pauses; load {min(found['loads']):.1f} to {max(found['loads']):.1f}")
    settings = {name: value for name, value in vars(options).items() if name != "kills"}
    print_json("pauses", "cpu", {**settings, "cores": os.cpu_count(), **found})


if __name__ == "__main__":
    main()
