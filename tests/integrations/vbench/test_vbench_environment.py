"""VBench's own environment is made once and marked when finished; a failure names the step and how to resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from vbench_standin import REQUIREMENTS

from recap.cli import main as cli
from recap_vbench import environment as made
from recap_vbench.environment import describe, installed, is_current, pins, set_up, vbench_folder

# A plug-in of its own: its commands are tested in `make test`, the rest in `make test-slow`.
pytestmark = pytest.mark.slow


def test_folder_is_in_the_cache_unless_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    assert vbench_folder() == tmp_path / "vbench"
    assert vbench_folder(tmp_path / "other") == tmp_path / "other"


def test_pins_are_those_that_were_resolved():
    wanted = {line.split("#")[0].strip() for line in pins().splitlines()}
    for line in ("vbench==0.1.5", "torch==2.5.1", "numpy==1.26.4", "transformers==4.33.2", "av<14"):
        assert line in wanted
    # Packages come from the index of the user's pip.
    assert "http" not in pins()


def test_dry_run_prints_everything_and_makes_nothing(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "vbench"
    monkeypatch.setattr(sys, "argv", ["recap", "vbench", "setup", "--dry-run", "--folder", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed = capsys.readouterr().err
    assert not stopped.value.code and not folder.exists()
    words = ("vbench==0.1.5", "torch==2.5.1", "GB", "Apache-2.0", "CC BY-NC 4.0", "detectron2", str(folder))
    assert all(word in printed for word in words)


def test_finished_environment_is_found_and_left_alone(environment):
    found = installed(environment)
    assert found.versions["vbench"] == "0.1.5" and Path(found.info).name == "VBench_full_info.json"
    assert list(found.unusable) == ["spatial_relationship"]
    assert "detectron2" in found.unusable["spatial_relationship"]
    # Its pins are not those of the package.
    assert is_current(environment, REQUIREMENTS) and not is_current(environment, pins())
    before = (environment / "ready.json").stat().st_mtime_ns
    notices = []
    assert set_up(environment, notices.append, requirements=REQUIREMENTS) == found
    assert notices == [f"VBench is ready in {environment}"]
    assert (environment / "ready.json").stat().st_mtime_ns == before


def test_a_failed_install_is_reported_and_resumed(tmp_path, monkeypatch, wheels):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # This folder has no wheel yet.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "vbench"
    with pytest.raises(ValueError, match=r"install the packages.*recap vbench setup") as failure:
        set_up(folder, lambda line: None, requirements=REQUIREMENTS, python=sys.executable)
    assert "No matching distribution" in str(failure.value)
    assert str(folder / "setup.log") in str(failure.value)
    with pytest.raises(ValueError, match=r"begun and not finished.*recap vbench setup"):
        installed(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    notices = []
    # The environment's Python exists already, so this one is not called.
    set_up(folder, notices.append, requirements=REQUIREMENTS, python="/no/such/python")
    assert "making the environment" not in notices and installed(folder).versions["vbench"] == "0.1.5"


def test_failed_first_step_is_named(tmp_path):
    with pytest.raises(ValueError, match="make the environment"):
        set_up(tmp_path / "vbench", lambda line: None, requirements=REQUIREMENTS, python="false")


def test_wrong_python_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(made, "PYTHON", (3, 2))
    with pytest.raises(ValueError, match=r"python3\.2 only"):
        set_up(tmp_path / "vbench", lambda line: None, requirements=REQUIREMENTS)


def test_a_missing_environment_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match="not there; run `recap vbench setup` first"):
        installed(tmp_path)
    # A marker of an older version.
    (tmp_path / "ready.json").write_text(json.dumps({"versions": {}}))
    with pytest.raises(ValueError, match="recap vbench setup"):
        installed(tmp_path)


def test_machines_without_a_decoder_wheel_are_warned(monkeypatch, tmp_path):
    monkeypatch.setattr(made.platform, "machine", lambda: "aarch64")
    assert any("decord" in line for line in describe(tmp_path)[-1:])
