from __future__ import annotations

import json
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.speed import main
from recap.fast.speed import SpeedSettings, make_parts, measure, run
from recap.fast.stopwatch import Stopwatch
from recap.memory.recap import RecapMemory

SMALL = SpeedSettings("untrained", "recap", "full", "cpu", "float32", 8)


def test_every_stage_is_timed_and_paths_are_compared(tmp_path: Path) -> None:
    result = run(SMALL, compare=True, plot=tmp_path / "growth.svg", profile=True)
    assert list(result["stages"]) == ["denoise", "decode", "look", "settle", "commit"]
    assert all(row["median"] > 0 and row["cold"] > 0 for row in result["stages"].values())
    # What is summed must not exceed the block that it is part of by more than the clock's grain.
    assert result["block"]["median"] * 1.5 > max(row["median"] for row in result["stages"].values())
    assert 0 < result["compare"]["largest_relative_error"] < 1e-4, "two paths, not one twice"
    assert result["path"] == "fast" and result["overhead_to_sink"] > 0 and len(result["kernels"]) == 10
    assert list(result["bank_parts"]) == ["propose", "retain", "admit", "slide"], "flow reads no keys"
    xml.dom.minidom.parseString((tmp_path / "growth.svg").read_text())


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--backbone", "untrained", "--blocks", "3", "--eager"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["path"] == "readable" and found["blocks"] == 3


def test_a_bank_by_keys_is_measured_too() -> None:
    policy = make_parts(SMALL).policy(replace(SMALL, admission="keys"))
    assert isinstance(policy, RecapMemory) and not policy.needs_pixels


def test_a_close_look_shows_what_a_bank_costs() -> None:
    settings = replace(SMALL, admission="keys")
    stages = measure(make_parts(settings), settings, 7, closely=True)["stages"]
    inside = [stages[name]["median"] for name in ("read_keys", "propose", "admit", "slide")]
    assert min(inside) > 0 and stages["retain"]["median"] <= stages["admit"]["median"]
    assert "retain" not in measure(make_parts(settings), settings, 2)["stages"]


def test_measuring_leaves_no_trace() -> None:
    parts = make_parts(SMALL)
    before = dict(vars(parts.backbone))
    measure(parts, SMALL, 2)
    assert vars(parts.backbone).keys() == before.keys()


def test_a_method_that_fails_is_put_back() -> None:
    class Fails:
        def verb(self) -> None:
            raise RuntimeError

    owner = Fails()
    with pytest.raises(RuntimeError), Stopwatch(cuda=False).timing([(owner, "verb")]):
        owner.verb()
    assert not vars(owner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": "nosuch"}, "known: "),
        ({"dtype": "float8"}, "known: "),
        ({"memory": "nosuch"}, "known: "),
        ({"admission": "nosuch"}, "known: "),
    ],
)
def test_wrong_names_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(replace(SMALL, **change), compare=False, plot=None, profile=False)
