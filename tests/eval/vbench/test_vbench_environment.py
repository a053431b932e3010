"""VBench's own environment: made once, marked when finished, and a failure says which step and how to go on."""

from __future__ import annotations

import json
import sys

import pytest
from vbench_standin import REQUIREMENTS

from recap.cli import main as cli
from recap.eval.vbench import environment as made
from recap.eval.vbench.environment import describe, installed, pins, set_up, vbench_folder


def test_folder_is_in_the_cache_unless_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    assert vbench_folder() == tmp_path / "vbench"
    assert vbench_folder(tmp_path / "other") == tmp_path / "other"


def test_pins_are_those_that_were_resolved():
    wanted = {line.split("#")[0].strip() for line in pins().splitlines()}
    for line in ("vbench==0.1.5", "torch==2.5.1", "numpy==1.26.4", "transformers==4.33.2", "av<14"):
        assert line in wanted
    assert "http" not in pins()  # packages come from where the user's pip takes them


def test_dry_run_tells_all_and_makes_nothing(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "vbench"
    monkeypatch.setattr(sys, "argv", ["recap", "vbench", "setup", "--dry-run", "--folder", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err
    assert not stopped.value.code and not folder.exists()
    for word in (
        "vbench==0.1.5",
        "torch==2.5.1",
        "GB",
        "Apache-2.0",
        "CC BY-NC 4.0",
        "detectron2",
        str(folder),
    ):
        assert word in said


def test_finished_environment_is_found_and_left_alone(environment):
    found = installed(environment)
    assert found.versions["vbench"] == "0.1.5" and found.info.name == "VBench_full_info.json"
    assert (
        list(found.unusable) == ["spatial_relationship"]
        and "detectron2" in found.unusable["spatial_relationship"]
    )
    assert not found.current  # other pins than the package's
    before = (environment / "ready.json").stat().st_mtime_ns
    said = []
    assert set_up(environment, said.append, requirements=REQUIREMENTS) == found
    assert said == [f"VBench is ready in {environment}"]
    assert (environment / "ready.json").stat().st_mtime_ns == before


def test_a_failed_install_says_so_and_goes_on(tmp_path, monkeypatch, wheels):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # no wheel there yet
    folder = tmp_path / "vbench"
    with pytest.raises(ValueError, match=r"install the packages.*recap vbench setup") as failure:
        set_up(folder, lambda line: None, requirements=REQUIREMENTS, python=sys.executable)
    assert "No matching distribution" in str(failure.value) and str(folder / "setup.log") in str(
        failure.value
    )
    with pytest.raises(ValueError, match=r"begun and not finished.*recap vbench setup"):
        installed(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    said = []
    set_up(
        folder, said.append, requirements=REQUIREMENTS, python="/no/such/python"
    )  # its Python is made already
    assert "making the environment" not in said and installed(folder).versions["vbench"] == "0.1.5"


def test_failed_first_step_is_named(tmp_path):
    with pytest.raises(ValueError, match="make the environment"):
        set_up(tmp_path / "vbench", lambda line: None, requirements=REQUIREMENTS, python="false")


def test_wrong_python_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(made, "PYTHON", (3, 2))
    with pytest.raises(ValueError, match=r"python3\.2 only"):
        set_up(tmp_path / "vbench", lambda line: None, requirements=REQUIREMENTS)


def test_nothing_set_up_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="not there; run `recap vbench setup` first"):
        installed(tmp_path)
    (tmp_path / "ready.json").write_text(json.dumps({"versions": {}}))  # of another time
    with pytest.raises(ValueError, match="recap vbench setup"):
        installed(tmp_path)


def test_machines_without_a_decoder_wheel_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(made.platform, "machine", lambda: "aarch64")
    assert any("decord" in line for line in describe(tmp_path)[-1:])
