"""Runs every test that needs CUDA, from the source tree, and keeps a log of the last run: `make test-gpu`.

Only files that hold such tests are collected, so that the packages of all others need not be there. Nothing is
installed and no environment is used: any Python with torch, Triton, pytest and OpenCV will do. The tests are dealt
to several processes, because compiling and launching keep one core busy for longer than the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "docs" / "log" / "gpu.txt"
MARKED = re.compile(r"pytest\.mark\.cuda|\bDEVICES\b")
"""Finds the marker itself, or the list of devices that tests/attention shares."""
LONGEST_MESSAGE = 300


def find_marked(folder: Path = ROOT / "tests") -> list[Path]:
    """List the test files that hold tests for a GPU."""
    return [file for file in sorted(folder.rglob("test_*.py")) if MARKED.search(file.read_text("utf-8"))]


class Outcomes:
    """Counts what became of the tests, and keeps why some were skipped or failed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.by_file: dict[str, Counter[str]] = {}
        self.remarks: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A test is one "call"; what stops it before or after that is reported in its place.
        if report.when == "call" or report.outcome != "passed":
            self._count(report, "error" if report.failed and report.when != "call" else report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._count(report, "error" if report.failed else "skipped")

    def _count(self, report: Any, outcome: str) -> None:
        self.counts[outcome] += 1
        self.by_file.setdefault(report.nodeid.partition("::")[0], Counter())[outcome] += 1
        if outcome != "passed":
            self.remarks.append(f"{outcome:8} {report.nodeid}: {_reason(report.longrepr)}")

    def add(self, counts: dict[str, int], by_file: dict[str, dict[str, int]], remarks: list[str]) -> None:
        """Add what another process counted."""
        self.counts.update(counts)
        for file, found in by_file.items():
            self.by_file.setdefault(file, Counter()).update(found)
        self.remarks += remarks

    def describe(self) -> str:
        names = ("passed", "skipped", "failed", "error")
        total = ", ".join(f"{self.counts[name]} {name}" for name in names)
        files = [
            f"{file}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            for file, counts in sorted(self.by_file.items())
        ]
        return "\n".join([f"result   {total}", "", *self.remarks, *([""] if self.remarks else []), *files])


def _reason(found: Any) -> str:
    """Return why a test was skipped or failed: every error of a chain, the first one first.

    A recording that fails hides what made it fail: its own error comes when the recording is ended.
    """
    crashes = [crash for _, crash, _ in getattr(found, "chain", []) if crash is not None]
    if crashes:
        told = (
            (Path(crash.path).name, crash.lineno, crash.message.splitlines() or [""]) for crash in crashes
        )
        return " -> ".join(f"{file}:{line}: {message[0][:LONGEST_MESSAGE]}" for file, line, message in told)
    text = found[2] if isinstance(found, tuple) else str(found)
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]


class Share(Outcomes):
    """Counts for one of several processes, which runs every n-th test."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        self._part, self._parts = part, parts

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        # The others need the room. Garbage is not collected by itself here, see tests/conftest.py.
        gc.collect()
        torch.cuda.empty_cache()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._part :: self._parts]

    def pytest_collectreport(self, report: Any) -> None:
        # All of them collect everything.
        if self._part == 0:
            super().pytest_collectreport(report)


def run_share(folder: Path, file: Path, part: int, parts: int) -> int:
    """Run one process's share of the marked tests, and write down what became of them."""
    share = Share(part, parts)
    options = ["-m", "cuda", "-rs", "--durations=8"]
    code = pytest.main([*options, *map(str, find_marked(folder))], plugins=[share])
    file.write_text(json.dumps([share.counts, share.by_file, share.remarks]), encoding="utf-8")
    return int(code)


def run(folder: Path, log: Path, commit: str, parts: int) -> int:
    """Run the marked tests of a folder in several processes and write the log; returns the worst exit code."""
    outcomes, began, codes = Outcomes(), time.time(), []
    with tempfile.TemporaryDirectory() as made:
        files = [Path(made) / f"{part}.json" for part in range(parts)]
        call = "import sys; from pathlib import Path; from tests.gpu import run_share; "
        calls = [
            call + f"sys.exit(run_share(Path({str(folder)!r}), Path({str(file)!r}), {part}, {parts}))"
            for part, file in enumerate(files)
        ]
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        shares = [subprocess.Popen([sys.executable, "-c", each], env=os.environ | paths) for each in calls]
        try:
            for share, file in zip(shares, files, strict=True):
                code = share.wait()
                # A process that a signal ended has a negative code.
                codes.append(128 - code if code < 0 else code)
                if file.exists():
                    outcomes.add(*json.loads(file.read_text("utf-8")))
                else:
                    outcomes.add({"error": 1}, {}, [f"error    one of the processes ended with {code}"])
        finally:
            # Whoever interrupts this wants none of them to run on.
            for share in shares:
                share.kill()
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))
    text = "\n".join(
        [
            "The last run of `make test-gpu`.",
            "",
            f"commit   {commit}",
            f"date     {date}",
            f"machine  {describe_machine()}",
            f"seconds  {time.time() - began:.0f}, {parts} processes",
            outcomes.describe(),
        ]
    )
    log.write_text(text + "\n", encoding="utf-8")
    # Where there are fewer tests than processes, some have nothing to do; all of them must not.
    nothing = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return max((code for code in codes if code != nothing), default=nothing)


def describe_machine() -> str:
    python = f"torch {torch.__version__}, Python {platform.python_version()}"
    if not torch.cuda.is_available():
        return f"no GPU, {python}"
    about = torch.cuda.get_device_properties(0)
    memory = f"{about.total_memory / 2**30:.0f} GiB"
    return f"{about.name}, {memory}, CUDA {torch.version.cuda}, {python}"


def find_commit() -> str:
    """Name the commit that is checked out, and whether files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown, as this is no checkout: name it, as in make test-gpu COMMIT=13348c0"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", default="", help="what is tested [default: as git says]")
    parser.add_argument("--log", type=Path, default=LOG, help="the file to write [default: docs/log/gpu.txt]")
    parser.add_argument("--parts", type=int, default=2, help="processes that share the tests [default: 2]")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("NOT TESTED: torch finds no CUDA device here; the log of the last run stays", file=sys.stderr)
        return 2
    return run(ROOT / "tests", given.log, given.commit or find_commit(), given.parts)


if __name__ == "__main__":
    sys.exit(main())
