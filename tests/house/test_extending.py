"""The recipes of docs/extending.md, run as printed, in a folder that is no part of the package."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recap
from recap.eval import metrics
from recap.io.lookup import look_up
from recap.registry import MEMORIES
from recap.tables.ask import Ask
from recap.tables.reproduce import How, reproduce

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text()
RECIPES = dict(re.findall(r"```python\n# (my_\w+)\.py\n(.*?)```", TEXT, flags=re.DOTALL))
REGISTER = """
from recap import registry
from my_memory import ShotOpeningConfig
from my_admission import BrightConfig
from my_backbone import WideConfig

registry.MEMORIES["shot-opening"] = ShotOpeningConfig
registry.ADMISSIONS["bright"] = BrightConfig
registry.BACKBONES["wide"] = WideConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the code of the page; `register` stands for the lines that the registry gets."""
    made = tmp_path_factory.mktemp("extending")
    for name, code in RECIPES.items():
        (made / f"{name}.py").write_text(code)
    (made / "register.py").write_text(REGISTER)
    return made


@pytest.fixture
def here(folder, monkeypatch):
    """Work in that folder, as a user does; its modules are forgotten afterwards."""
    monkeypatch.chdir(folder)
    yield folder
    for name in RECIPES:
        sys.modules.pop(name, None)


def test_the_page_has_the_five_recipes():
    assert set(RECIPES) == {"my_memory", "my_admission", "my_metric", "my_table", "my_backbone"}


def test_an_entry_in_the_registry_is_tested_by_the_contracts_without_any_list(folder):
    """The matrices are run on the toys alone: a memory, an admission and a backbone that only the registry knows."""
    chosen = "(shot-opening or (wide and recap) or bright) and not sixty"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "register", "tests/contracts/test_policies.py",
         "tests/contracts/test_admissions.py", "-k", chosen, "-rA"],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    for promise, name in [
        ("test_policy_runs_and_its_trace_adds_up", "untrained-shot-opening"),
        ("test_policy_runs_and_its_trace_adds_up", "wide-shot-opening"),
        ("test_stopping_and_continuing_changes_nothing", "embedded-shot-opening"),
        ("test_stopping_and_continuing_changes_nothing", "wide-recap"),
        ("test_generates_on_the_embedded_backbone_and_its_trace_is_plain_data", "recap-bright"),
        ("test_rows_do_not_know_of_each_other", "bright"),
    ]:
        # Names of backbones may come first, as in [blocks-of-3-bright].
        named = [line for line in passed if f"{promise}[" in line]
        assert any(line.split("[")[1].rstrip("]").endswith(name) for line in named), done.stdout


def test_modules_of_the_current_folder_are_found_by_path(here):
    before = list(sys.path)
    shots = [{"prompt": "a red boat", "seconds": 1.5}]
    parts = {
        "backbone": "my_backbone:WideConfig",
        "memory": {"name": "recap", "capacity_frames": 0.5},
        "admission": "my_admission:BrightConfig",
    }
    for memory in (parts["memory"], "my_memory:ShotOpeningConfig"):
        config = recap.RunConfig.from_dict({"shots": shots, **parts, "memory": memory})
        assert recap.RunConfig.from_dict(config.to_dict()) == config
        backbone = recap.build_backbone(config)
        policy = recap.build_memory(config, backbone.spec)
        plan = recap.make_plan([config.shots], backbone.spec)
        *_, last = recap.rollout(backbone, policy, plan, seeds=[0])
        assert last.memory.tokens["bank"] == backbone.spec.frame_tokens * (
            0.5 if isinstance(memory, dict) else 1
        )
    assert sys.path == before


def test_a_module_of_the_current_folder_hides_no_installed_one(here):
    (here / "json.py").write_text("raise RuntimeError('the wrong json')")
    sys.modules.pop("json.tool", None)
    assert look_up("memory", "json.tool:main", MEMORIES).__module__ == "json.tool"
    (here / "json.py").unlink()


@pytest.mark.parametrize(
    ("part", "name", "problem"),
    [
        ("memory", "my_metric:brightness", "not a dataclass of type MemoryConfig"),
        ("memory", "my_admission:BrightConfig", "not a dataclass of type MemoryConfig"),
        ("admission", "my_memory:ShotOpeningConfig", "not a dataclass of type AdmissionConfig"),
        ("memory", "my_nothing:Config", "cannot be imported"),
        ("memory", "my_memory:Nothing", "cannot be imported"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(here, part, name, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        recap.RunConfig.from_dict({"shots": [{"prompt": "a boat", "seconds": 1}], part: name})
    assert "\n" not in str(refused.value)


def test_a_table_measured_by_a_metric_runs(here, tmp_path):
    """Both are named from the current folder, which worker processes find too."""
    ask = Ask(
        backbone="untrained", prompts=1, seeds=1, seconds=1.5, flow="classical", embedder="hsv", device="cpu"
    )
    done = reproduce(["my_table:BRIGHTNESS"], ask, tmp_path, How(workers=1), notice=lambda _: None)
    assert done.left == 0
    rows = list(csv.DictReader((tmp_path / "brightness" / "table.csv").open()))
    shown = [("sink", "brightness"), ("recap", "brightness"), ("recap", "bank_edge_share")]
    assert [(row["row"], row["measure"]) for row in rows] == shown
    assert all(0 < float(row["mean"]) < 1 for row in rows[:2])


def test_a_metric_in_its_folder_is_found_by_itself(tmp_path, monkeypatch):
    """The folder of metrics with one file more, as a change to the package would have it."""
    (tmp_path / "my_metric.py").write_text(RECIPES["my_metric"])
    monkeypatch.setattr(metrics, "__path__", [*metrics.__path__, str(tmp_path)])
    metrics.all_measures.cache_clear()
    try:
        assert metrics.find_measure("brightness").headlines == ("brightness",)
    finally:
        metrics.all_measures.cache_clear()
        sys.modules.pop("recap.eval.metrics.my_metric", None)
