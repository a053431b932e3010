"""Fetching the public files, with a stand-in for the one function of the hub's library that is used."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from recap.backbones.wan.published import (
    SETS,
    PublicFile,
    fetch_weights,
    find_tiny_decoder,
    find_weights,
)
from recap.io.report import Reporter

LONGLIVE = "Efficient-Large-Model/LongLive-1.3B"
Usage = namedtuple("Usage", "total used free")


class Hub:
    """Writes what `files` holds where `hf_hub_download` would, and remembers what was asked for."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.stop_at: str | None = None

    def hf_hub_download(self, repo_id: str, filename: str, *, local_dir: Path) -> str:
        self.asked.append((repo_id, filename))
        if filename == self.stop_at:
            raise ConnectionError("the line went dead\nand more")
        path = Path(local_dir) / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[repo_id, filename])
        return str(path)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RECAP_OFFLINE")
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Hub:
    """A hub of the same files, small: the tables keep their names and get sizes and hashes of a few bytes."""
    hub = Hub()

    def small(file: PublicFile) -> PublicFile:
        content = f"content of {file.name}".encode()
        hub.files[file.repository, file.name] = content
        sha256 = file.sha256 and hashlib.sha256(content).hexdigest()
        return replace(file, size=len(content), sha256=sha256)

    for name, chosen in SETS.items():
        changed = replace(
            chosen,
            checkpoint=small(chosen.checkpoint),
            lora=chosen.lora and small(chosen.lora),
            text_encoder=small(chosen.text_encoder),
            autoencoder=small(chosen.autoencoder),
            tokenizer=tuple(small(file) for file in chosen.tokenizer),
        )
        monkeypatch.setitem(SETS, name, changed)
    library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(library, "hf_hub_download", hub.hf_hub_download)
    return hub


def fetch(name: str, dry_run: bool = False) -> list[str]:
    lines: list[str] = []
    fetch_weights(name, dry_run=dry_run, reporter=Reporter(lines.append))
    return lines


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("self-forcing", 17_567_236_932),
        ("infinite-forcing", 17_566_984_379),
        ("longlive", 20_367_375_277),
        ("causal-forcing", 17_566_984_379),
        ("causal-forcing-2step", 17_566_984_379),
        ("causal-forcing-1step", 17_566_984_379),
    ],
)
def test_the_tables_are_those_of_the_publishers(name: str, size: int) -> None:
    files = SETS[name].files
    assert sum(file.size for file in files) == size
    assert all(len(file.sha256 or "0" * 64) == 64 for file in files)
    assert not any("diffusion_pytorch_model" in file.name for file in files)  # the base transformer


@pytest.mark.parametrize("name", SETS)
def test_what_is_fetched_is_found(hub: Hub, home: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"`recap weights {name}`"):
        find_weights(name)
    fetch(name)
    found = find_weights(name)
    assert found.checkpoint.path.read_text() == f"content of {SETS[name].checkpoint.name}"
    assert found.checkpoint.path.is_relative_to(home)
    assert found.text_encoder.path.name == "models_t5_umt5-xxl-enc-bf16.pth"
    assert found.autoencoder.path.name == "Wan2.1_VAE.pth"
    assert found.tokenizer[0].path.is_file() and found.tokenizer[0].path.parent.name == "umt5-xxl"
    assert (found.lora is not None) == (name == "longlive")
    assert found.lora_alpha == (256.0 if name == "longlive" else None)
    assert found.ema is {"self-forcing": True, "longlive": False}.get(name)


def test_shared_files_are_fetched_once(hub: Hub) -> None:
    fetch("self-forcing")
    first = len(hub.asked)
    fetch("longlive")
    assert hub.asked[first:] == [(LONGLIVE, "models/longlive_base.pt"), (LONGLIVE, "models/lora.pt")]
    assert "longlive: nothing to fetch" in "\n".join(fetch("longlive"))
    assert len(hub.asked) == first + 2


def test_licences_come_before_anything_is_fetched(hub: Hub, home: Path) -> None:
    lines: list[str] = []

    def report(line: str) -> None:
        if not lines:
            assert not hub.asked and not home.exists()
        lines.append(line)

    fetch_weights("longlive", dry_run=False, reporter=Reporter(report))
    first_fetch = next(i for i, line in enumerate(lines) if line.startswith("fetching"))
    licences = [line for line in lines[:first_fetch] if line.startswith("licence")]
    assert "CC-BY-NC-SA-4.0" in licences[0] and "Apache-2.0" in licences[1]


def test_a_dry_run_only_talks(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1 << 40))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it must not even be imported
    lines = "\n".join(fetch("longlive", dry_run=True))
    for part in ("models/lora.pt, 2.80 GB", "20.37 GB to fetch", str(home), "CC-BY-NC-SA", "taew2_1"):
        assert part in lines
    assert "about 5.68 GB" in "\n".join(fetch("infinite-forcing", dry_run=True))
    assert not home.exists()


def test_too_little_room_is_lines_before_fetching(
    monkeypatch: pytest.MonkeyPatch, hub: Hub, home: Path
) -> None:
    needed = sum(file.size for file in SETS["longlive"].files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    with pytest.raises(ValueError, match=r"longlive.*free.*RECAP_HOME"):
        fetch("longlive")
    assert not hub.asked
    begun = home / "wan" / LONGLIVE / ".cache" / "huggingface" / "download" / "x.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"1")  # what a stopped download has already is not needed again
    fetch("longlive")


def test_a_stopped_download_says_how_to_resume(hub: Hub) -> None:
    hub.stop_at = "Wan2.1_VAE.pth"
    with pytest.raises(ValueError, match=r"the line went dead\); try again") as refusal:
        fetch("self-forcing")
    assert "Wan2.1_VAE.pth" in str(refusal.value)
    with pytest.raises(
        ValueError, match=r"Wan2\.1_VAE\.pth is missing or incomplete, and so are 4 other files"
    ):
        find_weights("self-forcing")
    hub.stop_at, hub.asked = None, []
    fetch("self-forcing")
    assert len(hub.asked) == 5
    find_weights("self-forcing")


def test_a_damaged_file_is_fetched_again(hub: Hub) -> None:
    fetch("self-forcing")
    path = find_weights("self-forcing").text_encoder.path
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="is missing or incomplete"):
        find_weights("self-forcing")
    hub.asked = []
    fetch("self-forcing")
    assert [name for _, name in hub.asked] == [path.name]


def test_other_content_is_refused(hub: Hub) -> None:
    key = ("gdhe17/Self-Forcing", "checkpoints/self_forcing_dmd.pt")
    genuine = hub.files[key]
    hub.files[key] = b"another size"
    with pytest.raises(ValueError, match=r"self_forcing_dmd\.pt.*sent 12 bytes"):
        fetch("self-forcing")
    hub.files[key] = bytes(len(genuine))
    with pytest.raises(ValueError, match=r"self_forcing_dmd\.pt.*sha256.*self_forcing_dmd\.pt\.wrong"):
        fetch("self-forcing")
    with pytest.raises(ValueError, match=r"self_forcing_dmd\.pt is missing or incomplete"):
        find_weights("self-forcing")
    hub.files[key] = genuine
    fetch("self-forcing")
    assert find_weights("self-forcing").checkpoint.path.read_bytes() == genuine


def test_an_unknown_size_is_not_checked(hub: Hub) -> None:
    hub.files["SOTAMak1r/Infinite-Forcing", "ema_model.pt"] = b"of whatever length it has"
    fetch("infinite-forcing")
    assert find_weights("infinite-forcing").checkpoint.path.read_bytes() == b"of whatever length it has"


def test_the_small_decoder_is_put_there_by_hand(hub: Hub, home: Path) -> None:
    fetch("self-forcing")
    assert find_tiny_decoder() is None
    path = home / "wan" / "taew2_1.pth"
    path.write_bytes(b"decoder")
    assert find_tiny_decoder() == path


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1 << 40))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install recap-forcing\[wan\]"):
        fetch("self-forcing")


def test_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, hub: Hub, home: Path) -> None:
    monkeypatch.setenv("RECAP_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"RECAP_OFFLINE forbids the network; unset it, or put the file"):
        fetch("self-forcing")
    assert not hub.asked and not home.exists()
    assert any("to fetch" in line for line in fetch("self-forcing", dry_run=True))


def test_unknown_names_are_refused() -> None:
    for use in (find_weights, fetch):
        with pytest.raises(ValueError, match="did you mean 'longlive'"):
            use("long-live")
