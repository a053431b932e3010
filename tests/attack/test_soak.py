"""A run of thousands of blocks: memory, files and threads stay as they are after the first hundreds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from recap.config import RunConfig
from recap.io.report import Reporter
from recap.run import generate


def resident_mb() -> float:
    """Return the memory of this process that is in use."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def soak(folder: Path, blocks: int, every: int) -> list[float]:
    """Generate so many blocks on `untrained`; returns and prints the memory after every so many."""
    # Blocks have 12 pictures, 16 a second; the first has 9.
    shots = [{"prompt": "a boat on the sea", "seconds": (12 * blocks - 3) / 16}]
    config = RunConfig.from_dict({"shots": shots, "backbone": "untrained", "flow": "classical"})
    measured: list[float] = []

    def progress(done: int, total: int, rate: float) -> None:
        if done % every == 0 and done:
            measured.append(resident_mb())
            files, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
            print(
                f"{done} of {total} blocks: {measured[-1]:.1f} MB, {files} files, {threads} threads",
                flush=True,
            )

    assert generate(config, folder, reporter=Reporter(lambda _: None, progress)).num_blocks == blocks
    return measured


def test_a_short_soak(tmp_path: Path) -> None:
    measured = soak(tmp_path / "run", 60, 10)
    assert max(measured[2:]) < 1.05 * measured[1]


@pytest.mark.slow
def test_5000_blocks_take_no_more_memory_than_1000(tmp_path: Path) -> None:
    measured = soak(tmp_path / "run", 5000, 250)
    assert max(measured[4:]) < 1.02 * measured[3]
