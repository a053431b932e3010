"""Makes VBench's own environment, once, and runs jobs in it; `recap vbench setup` marks it when it is finished.

pip uses the same index as the user's pip, because its configuration files and PIP_ variables apply here too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.io.files import weights_folder, write_whole
from recap_vbench.scores import DIMENSIONS

PACKAGE = resources.files("recap_vbench")
PYTHON = (3, 11)
SIZE = (
    "3.5 GB to download on Linux and more on disk, most of it CUDA for torch; VBench downloads the weights "
    "of a dimension, several GB in all, when it is first run"
)
LICENCE = (
    "VBench is Apache-2.0; the AMT in it, which scores motion_smoothness, is CC BY-NC 4.0 (non-commercial); the "
    "weights of GRiT, UMT, ViCLIP and Tag2Text come without a licence file"
)
AGAIN = "fix that and run `recap vbench setup` again, which resumes from there"
# An error message quotes this many characters of the log.
_TAIL = 300


class Installed(NamedTuple):
    """Describes a finished environment, as the file `ready.json` of its folder does."""

    versions: dict[str, str]
    info: str
    """The path of VBench's list of prompts."""
    unusable: dict[str, str]
    """Says of a module that cannot be imported why."""


def vbench_folder(folder: Path | None = None) -> Path:
    """Return the folder of the environment: `vbench` in $RECAP_HOME, unless another one is named."""
    return (folder.expanduser() if folder else weights_folder() / "vbench").resolve()


def python_of(folder: Path) -> Path:
    """Return the Python of an environment."""
    return folder / "env" / "bin" / "python"


def pins() -> str:
    """Return the packages of the environment, as pip reads them."""
    return PACKAGE.joinpath("requirements.txt").read_text(encoding="utf-8")


def is_current(folder: Path, wanted: str) -> bool:
    """Say whether the environment of a folder was made with these pins."""
    listed = folder / "requirements.txt"
    return listed.is_file() and listed.read_text(encoding="utf-8") == wanted


def describe(folder: Path) -> list[str]:
    """List what a set-up would do, line by line."""
    wanted = [line.split("#")[0].strip() for line in pins().splitlines()]
    lines = [
        f"environment: {folder / 'env'}, Python {PYTHON[0]}.{PYTHON[1]}",
        f"packages: {', '.join(line for line in wanted if line)}, and what they need",
        f"size: {SIZE}",
        f"licence: {LICENCE}",
        "object_class, multiple_objects, color and spatial_relationship also need detectron2: build it by hand",
    ]
    if platform.machine() in ("aarch64", "arm64"):
        lines.append(f"decord has no wheel for {platform.machine()}: build it into the environment by hand")
    return lines


def installed(folder: Path) -> Installed:
    """Return the finished environment of a folder."""
    found = _marked(folder)
    if found is None:
        problem = "begun and not finished" if (folder / "env").exists() else "not there"
        raise refuse("VBench's environment", str(folder), problem, "run `recap vbench setup` first")
    return found


def set_up(
    folder: Path, report: Callable[[str], None], *, requirements: str | None = None, python: str | None = None
) -> Installed:
    """Make the environment; one with the same pins is left as it is, an unfinished one is resumed."""
    wanted = requirements or pins()
    old = _marked(folder)
    if old is not None and is_current(folder, wanted):
        report(f"VBench is ready in {folder}")
        return old
    log, listed = folder / "setup.log", folder / "requirements.txt"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ready.json").unlink(missing_ok=True)
    log.write_bytes(b"")
    write_whole(listed, wanted.encode())
    made = folder / "env" / "made"
    if not made.exists():
        report("making the environment")
        make = [python or _find_python(), "-m", "venv", "--clear", str(folder / "env")]
        _step("make the environment", make, log)
        # Only now: venv installs pip last, so a Python alone does not mean that the environment is usable.
        made.touch()
    report("installing the pinned packages")
    install = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    _step("install the packages", [*install, "-r", str(listed)], log)
    report("importing VBench")
    checked = call(folder, {"do": "check", "dimensions": list(DIMENSIONS)}, log)
    if "error" in checked:
        raise refuse("vbench setup", "import VBench", f"{checked['error']} (log: {log})", AGAIN)
    for name, reason in checked["unusable"].items():
        report(f"cannot be used yet: {name} ({reason})")
    write_whole(folder / "ready.json", json.dumps(checked, indent=1).encode())
    return installed(folder)


def call(folder: Path, job: dict[str, Any], log: Path) -> dict[str, Any]:
    """Run a job in the environment of a folder; VBench's output goes to the log. The result may be {"error"}."""
    weights = Path(os.environ.get("VBENCH_CACHE_DIR") or folder / "weights")
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, resources.as_file(PACKAGE.joinpath("inside.py")) as inside:
        job_file, result_file = Path(work) / "job.json", Path(work) / "result.json"
        job_file.write_text(json.dumps({"weights": str(weights), **job}), encoding="utf-8")
        # -I keeps our PYTHONPATH and the script's own folder out of VBench's imports.
        command = [str(python_of(folder)), "-I", str(inside), str(job_file), str(result_file)]
        code = _run(command, log, cwd=work, VBENCH_CACHE_DIR=str(weights))
        if not result_file.is_file():
            how = f"was killed by signal {-code}" if code < 0 else "ended without a result"
            return {"error": f"VBench's Python {how}", "module": None}
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result


def _marked(folder: Path) -> Installed | None:
    try:
        found = Installed(**json.loads((folder / "ready.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if python_of(folder).exists() else None


def _find_python() -> str:
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    found = shutil.which(name)
    if found is None:
        limit = f"VBench's pins have wheels for {name} only, and it is not on the PATH"
        raise refuse("python", platform.python_version(), limit, f"install {name} next to this one")
    return found


def _step(what: str, command: Sequence[str], log: Path) -> None:
    if _run(command, log):
        tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-_TAIL:]
        raise refuse("vbench setup", what, f"failed: …{tail} (log: {log})", AGAIN)


def _run(command: Sequence[str], log: Path, cwd: str | None = None, **variables: str) -> int:
    """Run a command without the variables that would lead VBench's Python to our packages; return its exit code."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    with log.open("ab") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, env={**kept, **variables}, cwd=cwd, check=False
        )
    return done.returncode
