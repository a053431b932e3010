"""Measures a cluster of `recap serve` on this machine, next to what the simulation says; see benchmarks.capacity."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.capacity import Setting, Simulation
from benchmarks.studio import TICK_S, Viewer, start_server

WARM_S, WINDOW_S = 10.0, 30.0
PROMPT = "a fox on a beach by day"


def start_cluster(store: Path, backbone: str, sessions: int) -> tuple[subprocess.Popen[str], str]:
    """Start a cluster of one replica on a free port; return its process and address."""
    words = ("--store", str(store), "--backbone", backbone, "--sessions", str(sessions))
    return start_server("serve", *words, "--cpus", "1", "--idle", "600")


def stages(address: str) -> dict[str, float]:
    """Return the blocks that were made, and the seconds that each stage took for all of them."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    found = {m[1]: float(m[2]) for m in re.finditer(r'stage_seconds_total\{.*?stage="(\w+)"\} (\S+)', text)}
    blocks = re.search(r"recap_blocks_total\{.*?\} (\S+)", text)
    return {"blocks": float(blocks[1]) if blocks else 0.0, **found}


def watch(address: str, viewers: int) -> dict[str, Any]:
    """Let so many people watch, and compare what they saw with what the simulation says."""
    people = [Viewer(address, PROMPT) for _ in range(viewers)]

    def play(seconds: float) -> float:
        began = last = time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            for person in people:
                person.tick(now - last)
            last = now
            time.sleep(TICK_S)
        return last - began

    play(WARM_S)
    before = stages(address)
    for person in people:
        person.waited_s = 0.0
    elapsed = play(WINDOW_S)
    spent = {name: value - before.get(name, 0.0) for name, value in stages(address).items()}
    blocks = max(1.0, spent["blocks"])
    setting = Setting(
        sessions=viewers,
        block_s=spent["generate"] / blocks,
        after_s=(spent["encode"] + spent["store"]) / blocks,
        open_s=0.1,
        prompt_s=float("inf"),
        seconds=600.0,
    )
    simulated = Simulation(setting).run()
    waited = sum(person.waited_s for person in people)
    return {
        "viewers": viewers,
        "block_ms": round(1e3 * setting.block_s, 1),
        "after_ms": round(1e3 * setting.after_s, 1),
        "blocks_per_s": round(spent["blocks"] / elapsed, 2),
        "simulated_blocks_per_s": simulated["blocks_per_s"],
        "playing": round(1 - waited / elapsed / viewers, 3),
        "simulated_playing": simulated["playing"],
    }


def check(numbers: list[int], backbone: str) -> dict[str, Any]:
    """Measure a cluster with each number of viewers."""
    found = []
    for viewers in numbers:
        with tempfile.TemporaryDirectory() as store:
            process, address = start_cluster(Path(store), backbone, viewers)
            try:
                found.append(watch(address, viewers))
                print(found[-1], flush=True)
            finally:
                process.terminate()
                process.wait(60)
    return {"checked": found}
