"""Damaged LoRAs of every layout, votes, studies, their keys and schedules of lambda are read or refused.

A checksum turns most damage away at the door. So votes and keys are also sealed again after they were changed, as a
forger would, and the readers behind the door are tried, too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recap.backbones.wan.backbone import build_untrained
from recap.backbones.wan.lora import TARGETS, LoraChoice, open_lora, read_choice
from recap.backbones.wan.names import LORA_LAYOUTS
from recap.config import RunConfig
from recap.errors import RecapError
from recap.eval.study.box import BallotBox
from recap.eval.study.design import Study, canonical_json
from recap.eval.study.findings import find
from recap.eval.study.votes import ANSWERS, read_ballots, seal
from recap.io.files import read_json
from recap.memory.reinforcement import read_reinforcement
from recap.tables.study.report import write_report
from tests.attack.fuzzing import BYTES, FEW, HEADS, JSON_LIKE, MANY, WORDS, Reader, attack
from tests.study.conftest import Writer, fill, paper_key, session_of

KEY = paper_key(per_rival=2, identical=1, repeats=1)
UNTRAINED = build_untrained()
SPEC = UNTRAINED.spec
SHAPES = {name: tensor.shape for name, tensor in UNTRAINED.model.state_dict().items()}
RANK = 2
SCHEDULES = [
    "5",
    "5@layers:last-half",
    "5@steps:0-1,clean@heads:top-0.5",
    "5@gate:0.8@layers:0,2-",
    "share:0.24@steps:1",
]
CHOICES = ["style.safetensors", "style.safetensors:0.8", "a:b.pt:alpha=16", "style.safetensors:-1:alpha=4"]


def changes_of(layout: str) -> dict[str, torch.Tensor]:
    """Make a LoRA for every linear layer of a block, by the names of a layout."""
    down, up = ("lora_down", "lora_up") if layout in ("ComfyUI", "kohya") else ("lora_A", "lora_B")
    tensors = {}
    for name, shape in SHAPES.items():
        if name.endswith(TARGETS):
            layer = LORA_LAYOUTS[layout](name.removesuffix(".weight"))
            tensors[f"{layer}.{down}.weight"] = torch.zeros(RANK, shape[1])
            tensors[f"{layer}.{up}.weight"] = torch.zeros(shape[0], RANK)
            if layout == "kohya":
                tensors[f"{layer}.alpha"] = torch.tensor(10.0)
    return tensors


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Make a good file of every kind."""
    folder = tmp_path_factory.mktemp("good")
    for name in LORA_LAYOUTS:
        (folder / name).mkdir()
        save_file(changes_of(name), folder / name / "lora.safetensors", {"lora_alpha": "10"})
        _lora(folder / name / "lora.safetensors")
    config = {"r": RANK, "lora_alpha": 10, "use_rslora": False, "rank_pattern": {}}
    metadata = {f"transformer.{name}": value for name, value in config.items()}
    (folder / "diffusers" / "metadata.json").write_text(json.dumps(metadata))
    (folder / "peft").mkdir()
    save_file(changes_of("diffusers"), folder / "peft" / "adapter_model.safetensors")
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(config))
    raters = [Writer(KEY.study, session_of(number), f"rater {number}", number) for number in range(2)]
    for number, rater in enumerate(raters):
        fill(rater, KEY, lambda trial, question, number=number: ANSWERS[(len(trial[0]) + number) % 3])
    (folder / "votes.jsonl").write_bytes(b"".join(rater.data for rater in raters))
    (folder / "study.json").write_text(json.dumps(KEY.study.as_dict()))
    (folder / "key").mkdir()
    (folder / "key" / "key.json").write_text(json.dumps(KEY.as_dict()))
    shutil.copy(folder / "votes.jsonl", folder / "key")
    (folder / "schedules.txt").write_text("\n".join(SCHEDULES))
    (folder / "schedules.json").write_text(json.dumps([*SCHEDULES, 5, 2.5]))
    (folder / "choices.txt").write_text("\n".join(CHOICES))
    return folder


def _lora(path: Path) -> None:
    lora = open_lora(LoraChoice(path), SHAPES)
    for name in list(lora.factors)[:2]:
        lora.merge(name, torch.zeros(SHAPES[name]))
    assert str(lora)


def _config(file: Path) -> None:
    """Read the config next to a LoRA of peft's."""
    _lora(file.parent)


def _metadata(file: Path) -> None:
    """Read a config that diffusers keeps in the file of the LoRA."""
    lora = file.with_name("lora.safetensors")
    for key in ("lora_adapter_metadata", "lora_alpha", "ss_network_alpha"):
        text = file.read_bytes().decode(errors="replace")
        save_file(load_file(lora), file.with_name("changed.safetensors"), {key: text})
        with suppress(RecapError):
            _lora(file.with_name("changed.safetensors"))


def _votes(file: Path) -> None:
    with suppress(RecapError):
        find(KEY, read_ballots([file], KEY.study))
    box = BallotBox(file, KEY.study)
    for line in file.read_bytes().splitlines():
        with suppress(RecapError):
            box.add(line)


def _forged_votes(file: Path) -> None:
    """Seal changed lines again, each after the one before it of the same rater."""
    before: dict[str, str] = {}
    sealed = []
    for line in file.read_bytes().split(b"\n"):
        try:
            says = json.loads(line)
        except (ValueError, RecursionError):
            says = None
        if not isinstance(says, dict):
            sealed.append(line)
            continue
        says.pop("check", None)
        rater = str(says.get("session"))
        with suppress(UnicodeEncodeError):
            sealed.append(seal(says, before.get(rater, KEY.study.digest)))
            before[rater] = sealed[-1][-10:-2].decode()
    file.write_bytes(b"\n".join(sealed) + b"\n")
    _votes(file)


def _study(file: Path) -> None:
    study = Study.from_dict(read_json(file), str(file))
    assert study.trials and study.digest


def _key(file: Path) -> None:
    write_report([file.with_name("votes.jsonl")], file, file.with_name("report"))


def _forged_key(file: Path) -> None:
    """Give a changed key the digest that it should have; its votes are about the study that it names."""
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        values.pop("digest", None)
        values["digest"] = hashlib.sha256(canonical_json(values).encode()).hexdigest()
        file.write_text(json.dumps(values))
    _key(file)


def _schedule(text: object) -> None:
    with suppress(RecapError):
        read = read_reinforcement(text)
        assert read_reinforcement(read.plain) == read and read.describe()
        read.check(SPEC, 3)
        config = RunConfig.from_dict(
            {"shots": [{"prompt": "a", "seconds": 1}], "memory": {"name": "sink", "reinforcement": text}}
        )
        assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def _schedules(file: Path) -> None:
    for line in file.read_bytes().decode(errors="surrogateescape").split("\n"):
        _schedule(line)


def _lambdas(file: Path) -> None:
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return
    for value in values if isinstance(values, list) else [values]:
        _schedule(value)


def _choices(file: Path) -> None:
    for line in file.read_bytes().decode(errors="surrogateescape").split("\n"):
        with suppress(RecapError):
            read_choice(line)


READERS: dict[str, Reader] = {
    **{f"LoRA of {name}": (f"{name}/lora.safetensors", _lora, BYTES + HEADS) for name in LORA_LAYOUTS},
    "LoRA of peft": ("peft/adapter_model.safetensors", _config, BYTES + HEADS),
    "config of peft": ("peft/adapter_config.json", _config, JSON_LIKE),
    "metadata of a LoRA": ("diffusers/metadata.json", _metadata, JSON_LIKE),
    "votes": ("votes.jsonl", _votes, JSON_LIKE),
    "votes sealed again": ("votes.jsonl", _forged_votes, JSON_LIKE),
    "study": ("study.json", _study, JSON_LIKE),
    "key": ("key/key.json", _key, JSON_LIKE),
    "key sealed again": ("key/key.json", _forged_key, JSON_LIKE),
    "schedules": ("schedules.txt", _schedules, WORDS),
    "lambdas": ("schedules.json", _lambdas, JSON_LIKE),
    "choices of a LoRA": ("choices.txt", _choices, WORDS),
}


@pytest.mark.parametrize("name", READERS)
def test_a_few_damaged_files(name: str, good: Path, tmp_path: Path) -> None:
    attack(READERS[name], good, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name: str, good: Path, tmp_path: Path) -> None:
    attack(READERS[name], good, tmp_path, MANY // 3)
