"""`recap-plus` is the paper's memory with other settings, and every memory has a usual admission."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from recap.attach.attached import memory_builder
from recap.cli.settings import Generation, full_config
from recap.config import RunConfig, choose, override
from recap.errors import RecapError
from recap.fast.speed import SpeedSettings
from recap.io.report import SILENT
from recap.memory.recap import RecapConfig, RecapMemory, RecapPlusConfig
from recap.plan import Shot, make_plan
from recap.registry import ADMISSIONS, MEMORIES, load_backbone
from recap.rollout import rollout
from recap.run import build_memory
from recap.show.comparison import compare
from recap.studio.messages import NewSession
from recap.studio.settings import StudioSettings
from recap.studio.studio import make_config
from recap.tables.ask import Ask
from recap.tables.recipes import TABLES
from recap.tables.runs import plan_runs

USUAL = RecapPlusConfig.usual_admission
SHOTS = [{"prompt": "a boat on the sea", "seconds": 2.25}]
OTHER = next(name for name in ("random", "flow") if name != USUAL)


@dataclass(frozen=True, slots=True)
class ByChanceConfig(RecapConfig):
    """A memory of somebody else, whose bank is usually filled by chance."""

    usual_admission: ClassVar[str] = "random"


BY_CHANCE = f"{__name__}:{ByChanceConfig.__name__}"


def config_of(memory, **more):
    return RunConfig.from_dict({"shots": SHOTS, "backbone": "untrained", "memory": memory, **more})


@pytest.mark.parametrize(
    ("memory", "rule"), [*((n, k.usual_admission) for n, k in MEMORIES.items()), (BY_CHANCE, "random")]
)
def test_where_nobody_chooses_an_admission_the_memory_has_its_own(memory, rule):
    found = config_of(memory)
    assert found.admission == choose("admission", rule) == config_of(memory, admission="auto").admission
    assert RunConfig((Shot("a fox", 1.0),), memory=choose("memory", memory)).admission == found.admission
    # It is recorded by its own name, and read back as it was.
    assert found.to_dict()["admission"]["name"] == rule and RunConfig.from_dict(found.to_dict()) == found
    assert SpeedSettings("untrained", memory, "full", "cpu", "float32", 2).rule == found.admission
    # It goes with the memory, in whatever config.
    assert replace(config_of("none"), memory=found.memory).admission == found.admission
    assert replace(found, memory=choose("memory", "none")).admission.name == "flow"


@pytest.mark.parametrize("memory", ["recap", "recap-plus"])
def test_an_admission_that_is_chosen_wins(memory):
    chosen = config_of(memory, admission=OTHER)
    assert chosen.admission.name == OTHER
    assert replace(chosen, memory=choose("memory", "recap-plus")).admission.name == OTHER
    assert full_config({"shots": SHOTS, "memory": memory}, [f"admission={OTHER}"]).admission.name == OTHER
    assert SpeedSettings("untrained", memory, "full", "cpu", "float32", 2, admission=OTHER).rule.name == OTHER


def test_settings_without_a_name_are_those_of_the_usual_admission():
    plain = override({"shots": SHOTS, "memory": BY_CHANCE}, ["admission.seed=7"])
    found = RunConfig.from_dict(plain).admission
    assert found.name == "random" and found.settings.seed == 7 and not found.usual
    by_flow = RunConfig.from_dict(override({"shots": SHOTS}, ["admission.claims=carried"]))
    assert by_flow.admission.name == "flow" and by_flow.admission.settings.claims == "carried"
    with pytest.raises(RecapError, match="claims"):
        RunConfig.from_dict(override({"shots": SHOTS, "memory": BY_CHANCE}, ["admission.claims=carried"]))


def test_a_repeated_run_with_another_memory_has_that_memory_s_admission(tmp_path):
    record = tmp_path / "run.json"

    def repeated(chosen, **recorded):
        record.write_text(json.dumps({"config": config_of(**recorded).to_dict()}))
        values = Generation(record=record).values(own_memory=chosen is not None)
        return full_config({**values, "memory": values.get("memory", chosen)}, [])

    assert repeated("recap-plus", memory="recap").admission.name == USUAL
    assert repeated("recap", memory="recap-plus").admission.name == "flow"
    # What somebody chose stays, and so does all of a run that keeps its memory.
    assert repeated("recap-plus", memory="recap", admission=OTHER).admission.name == OTHER
    old = {"memory": "recap", "admission": {"name": "flow", "claims": "carried"}}
    assert repeated("recap-plus", **old).admission.settings.claims == "carried"
    assert repeated(None, memory="recap-plus").admission.name == USUAL


def test_a_session_of_the_studio_has_an_admission_for_each_of_its_memories(tmp_path):
    settings = StudioSettings(tmp_path, backbone="untrained")
    new = NewSession(prompt="a boat", memory="recap", second_memory="recap-plus")
    assert make_config(settings, new).admission.name == "flow"
    assert make_config(settings, new, new.second_memory).admission.name == USUAL
    other = replace(new, admission=OTHER)
    assert make_config(settings, other, new.second_memory).admission.name == OTHER
    with pytest.raises(RecapError, match="admission is 'nonsense'"):
        make_config(settings, replace(new, admission="nonsense"))


def test_an_attached_pipeline_has_it_without_a_decoder():
    spec = load_backbone("untrained").spec
    policy = memory_builder("recap-plus", "auto", "auto")(spec, "cpu")
    assert isinstance(policy, RecapMemory) and policy.needs_pixels == (USUAL != "keys")
    by_object = memory_builder(RecapPlusConfig(), "auto", "auto")(spec, "cpu")
    assert by_object.needs_pixels == policy.needs_pixels
    assert memory_builder("recap-plus", "flow", "classical")(spec, "cpu").needs_pixels


def test_a_comparison_gives_each_memory_its_own_admission(tmp_path):
    base = RunConfig.from_dict({"shots": SHOTS, "backbone": "untrained", "flow": "classical"})
    rules = {"recap": "flow", "recap-plus": USUAL}
    # A memory is added later, and the order is another: it is the same comparison.
    for memories in (["recap-plus"], ["recap", "recap-plus"], ["recap-plus", "recap"]):
        done = compare(base, memories, tmp_path / "own", reporter=SILENT)
        for name, run in done.runs.items():
            assert json.loads((run / "run.json").read_text())["config"]["admission"]["name"] == rules[name]
    chosen = replace(base, admission=choose("admission", OTHER))
    done = compare(chosen, ["recap-plus"], tmp_path / "chosen", reporter=SILENT)
    record = json.loads((done.runs["recap-plus"] / "run.json").read_text())
    assert record["config"]["admission"]["name"] == OTHER


def test_it_is_the_memory_of_the_paper_with_other_settings_bit_for_bit():
    backbone = load_backbone("untrained")
    by_hand = {"name": "recap", "reinforcement": RecapPlusConfig().reinforcement}
    made = []
    for config in (
        config_of("recap-plus"),
        config_of(by_hand, admission=USUAL),
        config_of("recap", flow="classical"),
    ):
        policy = build_memory(config, backbone.spec, SILENT.notice)
        plan = make_plan([config.shots], backbone.spec)
        latents = torch.cat([block.latents for block in rollout(backbone, policy, plan, seeds=[1])], dim=1)
        made.append((latents, policy.state()))
    (plus, state), (same, other_state), (paper, _) = made
    assert torch.equal(plus, same) and not torch.equal(plus, paper)
    assert state.keys() == other_state.keys()
    assert all(torch.equal(state[name], other_state[name]) for name in state)


STORED = {
    "none": "592a6832457508df",
    "sink": "93a878c1103b115c",
    "recap": "e2a1de4677905c1e",
    "deep-forcing": "96f171f5210afc32",
    "memrope": "19d2347d8dd99f4c",
    "rolling-sink": "d7d302af758b9888",
    "relax-forcing": "1dcc2fb7db68beea",
}


@pytest.mark.parametrize("memory", STORED)
def test_what_runs_of_the_older_memories_record_stays_the_same(memory):
    """The config in a run.json is compared when a run is resumed, so that another form would refuse older runs."""
    config = RunConfig.from_dict(
        {"shots": [{"prompt": "a fox", "seconds": 3}], "memory": memory, "device": "cpu"}
    )
    written = json.dumps(config.to_dict(), sort_keys=True)
    assert hashlib.sha256(written.encode()).hexdigest()[:16] == STORED[memory]


KEYS = {
    "none": "f22fa9a6182983d7a33f1a6d",
    "sink, lambda 5": "58c791028ac085f3ad95b65c",
    "deep-forcing": "be8dca4b3fef6f2b97272b35",
    "bank, lambda 1": "5103d6f57590603f7d71a341",
    "recap, keys": "638ad244535b0b67c6da34a6",
    "recap": "7733187e8dca88b063d3ddbd",
}


def test_runs_of_older_tables_keep_their_keys():
    """A key finds the results of a run; another one would make every published table be generated again."""
    ask = Ask(prompts=1, seeds=1, device="cpu")
    found = {run.row.name: run.job.key for run in plan_runs(TABLES["entering"], ask)}
    assert {name: found[name] for name in KEYS} == KEYS


def test_every_memory_names_an_admission_that_there_is():
    assert all(kind.usual_admission in ADMISSIONS for kind in MEMORIES.values())
    # The paper's is the paper's.
    assert MEMORIES["recap"].usual_admission == "flow" and RecapConfig().reinforcement == 5.0


@pytest.mark.parametrize("table", ["", "-60s", "-entering"])
def test_what_is_confirmed_shares_its_runs_with_the_search_and_with_the_tables_of_rivals(table):
    def keys(name):
        found = plan_runs(TABLES[name], Ask(prompts=2, seeds=1, device="cpu", half="confirm"))
        return {run.row.name: run.job.key for run in found}

    confirmed, searched = keys(f"confirm{table}"), keys(f"beyond{table}")
    assert TABLES[f"confirm{table}"].ours == "recap-plus"
    assert len(set(confirmed.values())) == len(confirmed) == 8
    # The settings of recap-plus are those of a row that was searched.
    rivals = {"sink", "deep-forcing", "memrope", "rolling-sink", "relax-forcing"}
    assert {confirmed[name] for name in confirmed.keys() - rivals} <= set(searched.values())
    assert rivals < confirmed.keys()
