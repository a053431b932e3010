"""What can be said of the Dockerfile without docker: its files are there and enough, its names and versions exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from recap.io.older import tomllib

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def copied() -> list[str]:
    """The files and folders that reach the image."""
    return [name for line in LINES if line.startswith("COPY ") for name in line.split()[1:-1]]


def test_the_package_can_be_built_from_what_is_copied(tmp_path):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied()) == allowed
    for name in copied():
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len(list((tmp_path / "dist").glob("*.whl"))) == 1


def test_versions_are_those_of_the_constraints():
    pinned = (ROOT / "constraints.txt").read_text()
    assert len(re.findall(r"^torch==", pinned, flags=re.MULTILINE)) == 1
    installs = [line for line in LINES if line.startswith("RUN pip install")]
    assert len(installs) == 4
    for line in installs:
        assert "-c constraints.txt" in line or "grep '^torch==' constraints.txt" in line
    extras = {
        name
        for line in installs
        for group in re.findall(r"\.\[([\w,]+)\]", line)
        for name in group.split(",")
    }
    assert extras == {"wan", "studio"} <= PROJECT["optional-dependencies"].keys()


def test_stages_commands_and_the_usage_at_its_top_fit_together():
    stages = [line.split()[-1] for line in LINES if line.startswith("FROM")]
    # The default is the last.
    assert stages == ["sources", "cuda", "cpu"]
    assert re.findall(r"^FROM (\S+) AS", TEXT, flags=re.MULTILINE)[1:] == ["sources", "sources"]
    assert set(re.findall(r"--target (\w+)", TEXT)) <= set(stages)
    assert re.findall(r'ENTRYPOINT \["(\w+)"\]', TEXT) == list(PROJECT["scripts"])
    from recap.cli.main import COMMANDS

    used = re.findall(r"recap(?::cuda)? (generate|[a-z]+) (?:\"|longlive)", TEXT)
    assert used and set(used) <= set(COMMANDS)
    version = re.search(r"^FROM python:(\d+)\.(\d+)", TEXT, flags=re.MULTILINE)
    assert version and (int(version[1]), int(version[2])) >= (3, 10)


def test_the_weights_folder_is_the_one_that_is_mounted():
    home = re.search(r"RECAP_HOME=(\S+)", TEXT)
    assert home and f"recap-weights:{home[1]}" in TEXT and f"mkdir -m 1777 {home[1]} /work" in TEXT
