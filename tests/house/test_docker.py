"""What can be said of the Dockerfile without docker: its files are there and enough, its names and versions exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recap.io.older import tomllib

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def copied() -> list[str]:
    """The files and folders that reach the image."""
    names = [name for line in LINES if line.startswith("COPY ") for name in line.split()[1:-1]]
    # Both images copy the sources.
    return list(dict.fromkeys(names))


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


def pins() -> dict[str, str]:
    """Every package whose version is fixed in the images."""
    lines = [
        line
        for name in ("constraints.txt", "constraints-image.txt")
        for line in (ROOT / name).read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines), "a package is pinned twice"
    return pinned


# Of the images, wherever this is tested.
LINUX = {"os_name": "posix", "platform_system": "Linux", "sys_platform": "linux"}


def test_everything_that_is_installed_is_pinned():
    """What the images' extras need, what that needs, and so on, as installed here: constraints.txt was not all."""
    pinned, seen = pins(), set[tuple[str, str]]()
    waiting = [("recap-forcing", extra) for extra in ("", "wan", "studio")]
    while waiting:
        name, extra = waiting.pop()
        # Another version than the pinned one may need other packages.
        other = name in pinned and version(name).partition("+")[0] != pinned[name]
        if (name, extra) in seen or other:
            continue
        seen.add((name, extra))
        for line in requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra, **LINUX}):
                waiting += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    # What a CUDA build of torch brings is fixed by torch.
    names = {name for name, _ in seen if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert "huggingface-hub" in names
    assert names - {"recap-forcing"} <= pinned.keys()


def test_a_change_of_the_sources_does_not_install_torch_again():
    """Docker runs again whatever stands below a changed COPY."""
    for stage in TEXT.split("\nFROM base AS ")[1:]:
        torch_at, sources_at, package_at = (
            stage.index(text) for text in ("^torch==", "\nCOPY src src", "RUN pip install -c")
        )
        assert torch_at < sources_at < package_at
    assert "COPY src" not in TEXT.partition("\nFROM base AS")[0]


def test_versions_are_those_of_the_constraints():
    pinned = (ROOT / "constraints.txt").read_text()
    assert len(re.findall(r"^torch==", pinned, flags=re.MULTILINE)) == 1
    installs = [line for line in LINES if line.startswith("RUN pip install")]
    assert len(installs) == 4
    for line in installs:
        assert (
            "-c constraints.txt -c constraints-image.txt" in line or "grep '^torch==' constraints.txt" in line
        )
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
    assert stages == ["base", "cuda", "cpu"]
    assert re.findall(r"^FROM (\S+) AS", TEXT, flags=re.MULTILINE)[1:] == ["base", "base"]
    assert set(re.findall(r"--target (\w+)", TEXT)) <= set(stages)
    assert re.findall(r'ENTRYPOINT \["(\w+)"\]', TEXT) == list(PROJECT["scripts"])
    from recap.cli.main import COMMANDS

    used = re.findall(r"recap(?::cuda)? (generate|[a-z]+) (?:\"|longlive)", TEXT)
    assert used and set(used) <= set(COMMANDS)
    version = re.search(r"^FROM python:(\d+)\.(\d+)", TEXT, flags=re.MULTILINE)
    assert version and (int(version[1]), int(version[2])) >= (3, 10)


def test_the_weights_folder_is_the_one_that_is_mounted():
    home = re.search(r"RECAP_HOME=(\S+)", TEXT)
    assert home and f"recap-weights:{home[1]}" in TEXT
    kernels = f"{home[1]}/.triton"
    assert f"mkdir -p -m 1777 {home[1]} {kernels} {kernels}/cache /work" in TEXT
    # With docker run --user, HOME was / otherwise, where Triton cannot keep what it compiled.
    assert re.findall(r" HOME=(\S+)", TEXT) == [home[1]]
