"""Does the studio keep up, answer soon, stay small? `python -m benchmarks.studio --minutes 30 --backbone untrained`

It starts `recap studio` as a process of its own, watches a session as a page does (the playhead moves in real time as
far as there is video), changes the prompt and forgets patches now and then, and samples the server's memory. Printed
are the rate at which the video could be played, the time from a prompt to its first block, and how memory grew after
the first tenth; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from benchmarks.timing import print_json

PROMPTS = (
    "a fox on a beach by day",
    "a bus on a beach by day",
    "an empty beach by day",
    "a cat on a beach by day",
)
TICK_S = 0.1


def start_server(command: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start `recap studio` or `recap serve` on a free port; return its process and address."""
    words = (command, "--port", "0", *words)
    process = subprocess.Popen(
        [sys.executable, "-m", "recap", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(rf"{command}: (http://\S+?:\d+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            wait_for(f"{found[1]}/v1/about")
            return process, found[1]
    raise SystemExit("the server ended before it listened")


def wait_for(address: str, seconds: float = 60.0) -> None:
    """Wait until a server answers."""
    last = time.perf_counter() + seconds
    while True:
        try:
            with urllib.request.urlopen(address):
                return
        except OSError:
            if time.perf_counter() > last:
                raise
            time.sleep(TICK_S)


def resident_mb(process: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


class Viewer:
    """Watches a session as a page does: what has arrived can be played."""

    def __init__(self, address: str, prompt: str) -> None:
        body = json.dumps({"v": 1, "prompt": prompt, "seed": 1}).encode()
        request = urllib.request.Request(f"{address}/v1/sessions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            name = json.load(answer)["session"]
        self._socket: ClientConnection = connect(
            f"{address.replace('http', 'ws')}/v1/sessions/{name}/stream", max_size=None
        )
        self.there_s, self.second, self.waited_s, self.blocks = 0.0, 0.0, 0.0, 0
        self.last: dict[str, Any] = {}
        self.errors: list[str] = []
        self._asked: tuple[float, str] | None = None
        self.answers_s: list[float] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(ConnectionClosed):
            self._hear()

    def _hear(self) -> None:
        for message in self._socket:
            if isinstance(message, bytes):
                continue
            self.take(json.loads(message))

    def take(self, event: dict[str, Any]) -> None:
        """Note what an event of the stream says."""
        if event["type"] == "block":
            self.there_s, self.last = event["end_s"], event
            self.blocks += 1
            if self._asked is not None and event["prompt"] == self._asked[1]:
                self.answers_s.append(time.perf_counter() - self._asked[0])
                self._asked = None
        elif event["type"] == "dropped":
            self.there_s = min(self.there_s, self.second)
        elif event["type"] == "error":
            self.errors.append(event["text"])

    def say(self, kind: str, **values: Any) -> None:
        self._socket.send(json.dumps({"v": 1, "type": kind, **values}))

    def tick(self, seconds: float) -> None:
        """Let time go by: the picture moves on, or waits for the model."""
        moved = min(seconds, max(0.0, self.there_s - self.second))
        self.second += moved
        self.waited_s += seconds - moved
        self.say("playhead", second=self.second)

    def prompt(self, text: str) -> None:
        self._asked = (time.perf_counter(), text)
        self.say("prompt", text=text, playhead_s=self.second)


def main() -> None:
    """Watch, and print what it was like."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--prompt-every", type=float, default=15.0, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, address = start_server(
            "studio", "--no-open", "--folder", folder, "--backbone", options.backbone
        )
        try:
            record = watch(process.pid, address, options)
        finally:
            process.terminate()
            process.wait(30)
    print_json("studio", "cpu", record)


def watch(process: int, address: str, options: argparse.Namespace) -> dict[str, Any]:
    """Watch for so many minutes; return what was measured."""
    viewer = Viewer(address, PROMPTS[0])
    while not viewer.blocks:
        time.sleep(TICK_S)
    began = last = time.perf_counter()
    memory: list[Any] = []
    prompts = forgotten = 0
    while (now := time.perf_counter()) - began < 60 * options.minutes:
        viewer.tick(now - last)
        last = now
        turn = (now - began) / options.prompt_every
        if turn >= prompts + 1:
            prompts += 1
            viewer.prompt(PROMPTS[prompts % len(PROMPTS)])
        # Half-way between two prompts, when nothing is being dropped.
        if turn >= forgotten + 1.5 and viewer.last.get("bank"):
            forgotten += 1
            viewer.say("forget", slots=[viewer.last["bank"][0]["slot"]], block=viewer.last["index"])
        if len(memory) <= (now - began) // 10:
            memory.append(resident_mb(process))
            print(f"{now - began:.0f} s: {memory[-1]:.0f} MB, played {viewer.second:.1f} s", file=sys.stderr)
        time.sleep(TICK_S)
    spent = time.perf_counter() - began
    settled = memory[len(memory) // 10 :]
    answers = viewer.answers_s
    print(f"played {viewer.second:.1f} s of video in {spent:.1f} s; waited {viewer.waited_s:.1f} s")
    if answers:
        print(
            f"prompt to its first block: median {statistics.median(answers):.2f} s, longest {max(answers):.2f} s"
        )
    growth = max(settled) / settled[0] - 1
    print(f"memory {settled[0]:.0f} MB, at most {max(settled):.0f} MB later (+{growth:.1%})")
    return {
        "backbone": options.backbone,
        "minutes": spent / 60,
        "cores": os.cpu_count(),
        "played_share": viewer.second / spent,
        "blocks": viewer.blocks,
        "answers_s": answers,
        "memory_mb": memory,
        "growth": growth,
        "errors": viewer.errors,
    }


if __name__ == "__main__":
    main()
