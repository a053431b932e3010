"""Readers of files survive anything: damaged and rewritten files are read or refused, and nothing else happens.

Each case changes a good file, either its bytes or, for JSON, its values, and gives it to the reader (`fuzzing`). A
few cases of each reader run with every test run, thousands in slow mode.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recap import generate
from recap.backbones.wan.backbone import build_untrained
from recap.backbones.wan.checkpoint import fit_tensors, open_checkpoint, read_tensors
from recap.backbones.wan.lora import LoraChoice, open_lora
from recap.config import RunConfig, read_record
from recap.io.cast import read_cast, write_cast
from recap.io.files import read_json
from recap.io.opening import read_opening
from recap.io.trace import read_seconds, read_trace, replay_bank
from recap.io.video import ClipWriter, join_clips, open_clip
from recap.plan import make_plan
from recap.run import read_spec
from recap.show.comparison import RECORD, _claim, _with_recorded_flow
from recap.show.result import Run
from recap.show.run_page import read_summary, write_run_page
from recap.show.sheet import write_png
from recap.tables.folder import begun_with, check_folder
from recap.tables.report import write_report
from recap.tables.runner import ResultStore
from tests.attack.fuzzing import BYTES, FEW, HEADS, JSON_LIKE, MANY, Reader, attack
from tests.io.test_cast import subject_of

UNTRAINED = build_untrained()
SPEC = UNTRAINED.spec
SHAPES = {name: tensor.shape for name, tensor in UNTRAINED.model.state_dict().items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Make a good file of every kind."""
    folder = tmp_path_factory.mktemp("good")
    generate("a boat", seconds=1.0, backbone="untrained", folder=folder / "run", flow="classical",
             trace_offered=True)  # fmt: skip
    model = UNTRAINED.model
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save({"generator_ema": model.state_dict()}, folder / "model.pt")
    torch.save(_lora(model.state_dict()), folder / "lora.pt")
    save_file(_lora(model.state_dict()), folder / "lora.safetensors")
    pixels = torch.rand(17, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with ClipWriter(folder / "clip.mp4", (64, 96), 16) as clip:
        clip.write(pixels)
    write_png(folder / "picture.png", pixels[0].mul(255).byte().permute(1, 2, 0).numpy())
    script = [{"prompt": "a boat", "seconds": 1.0}, {"prompt": "a fox", "seconds": 2.0, "cut": True}]
    (folder / "script.json").write_text(json.dumps(script))
    results = [{"key": f"k{n}", "result": {"a": {"b": n}}, "made_by": {"recap": "1"}} for n in range(3)]
    (folder / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    measured = {
        "name": "m",
        "judge": "hsv",
        "head": ["", "here"],
        "rows": [["recap", "0.5"]],
        "ours": "recap",
    }
    section = {"title": "t", "remarks": ["r"], "measured": [measured], "figures": ["<svg/>"], "video": ""}
    section |= {"video_about": "v", "sheet": "", "sheet_about": "s"}
    table = {"table": "reappearance", "about": {"prompts": 1, "seeds": 1}, "section": section}
    (folder / "table.json").write_text(json.dumps(table))
    record = {"table": "reappearance", "prompts": 2, "seeds": 2, "backbone": "untrained", "left_out": []}
    (folder / "record.json").write_text(json.dumps(record))
    config = RunConfig.from_dict(read_json(folder / "run" / "run.json")["config"])
    shared = {
        key: json.loads(json.dumps(value)) for key, value in config.to_dict().items() if key != "memory"
    }
    (folder / RECORD).write_text(json.dumps(shared))
    write_cast(folder / "two.cast", [subject_of(SPEC), subject_of(SPEC, "bus")])
    return folder


def _lora(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from recap.backbones.wan.lora import TARGETS

    found = {}
    for name, weight in weights.items():
        if name.endswith(TARGETS):
            stem = name.removesuffix(".weight")
            found[f"{stem}.lora_A.weight"] = torch.zeros(2, weight.shape[1])
            found[f"{stem}.lora_B.weight"] = torch.zeros(weight.shape[0], 2)
    return found


def _run(file: Path) -> None:
    """Read a run's folder in every way."""
    folder = file.parent
    about = read_record(folder)
    RunConfig.from_dict(about["config"])
    if "spec" in about:
        # Without one the backbone is loaded, which is no reader.
        read_spec(about)
    run = Run(folder)
    assert run.config is not None and run.trace is not None and run.videos
    read_summary(folder)


def _page(file: Path) -> None:
    write_run_page(file.parent)


def _trace(file: Path) -> None:
    list(replay_bank(read_trace(file)))


def _script(file: Path) -> None:
    config = RunConfig.from_dict({"shots": read_json(file), "backbone": "untrained"})
    make_plan([config.shots], SPEC)


def _clip(file: Path) -> None:
    clip = open_clip(file)
    for number, _ in enumerate(clip.pictures()):
        if number > 200:
            break
    join_clips([file, file], file.with_name("joined.mp4"))


def _opening(file: Path) -> None:
    read_opening(file, SPEC, lambda _: None)


def _checkpoint(file: Path) -> None:
    found = fit_tensors(open_checkpoint(file, None), UNTRAINED.model.spec)
    for _ in read_tensors(found, torch.float32, ()):
        pass


def _read_lora(file: Path) -> None:
    lora = open_lora(LoraChoice(file, alpha=4.0), SHAPES)
    for name in list(lora.factors)[:2]:
        lora.merge(name, torch.zeros(SHAPES[name]))


def _report(file: Path) -> None:
    (file.parent / "table.md").write_text("# t\n\nwords\n")
    write_report([file.parent.parent])
    check_folder(file.parent, {}, ["recap"])


def _table_record(file: Path) -> None:
    begun_with(file.parent)
    check_folder(file.parent, {"table": "reappearance", "prompts": 2, "seeds": 2}, ["recap"])


def _comparison(file: Path) -> None:
    config = RunConfig.from_dict({"shots": [{"prompt": "a", "seconds": 1}], "backbone": "untrained"})
    _with_recorded_flow(config, file.parent)
    _claim(file.parent, {"recap": config})


READERS: dict[str, Reader] = {
    "run.json": ("run/run.json", _run, JSON_LIKE),
    "summary.json": ("run/summary.json", _page, JSON_LIKE),
    "page of a trace": ("run/trace.jsonl", _page, JSON_LIKE),
    "timing.jsonl": ("run/timing.jsonl", read_seconds, JSON_LIKE),
    "trace.jsonl": ("run/trace.jsonl", _trace, JSON_LIKE),
    "script": ("script.json", _script, JSON_LIKE),
    "result store": ("runs.jsonl", lambda file: ResultStore(file.parent), JSON_LIKE),
    "table.json": ("table.json", _report, JSON_LIKE),
    "record.json": ("record.json", _table_record, JSON_LIKE),
    "comparison.json": (RECORD, _comparison, JSON_LIKE),
    "clip": ("clip.mp4", _clip, BYTES),
    "opening clip": ("clip.mp4", _opening, BYTES),
    "opening picture": ("picture.png", _opening, BYTES),
    "safetensors": ("model.safetensors", _checkpoint, BYTES + HEADS),
    "torch file": ("model.pt", _checkpoint, BYTES),
    "LoRA": ("lora.pt", _read_lora, BYTES),
    "LoRA in safetensors": ("lora.safetensors", _read_lora, BYTES + HEADS),
    "cast": ("two.cast", read_cast, BYTES),
}


@pytest.mark.parametrize("name", READERS)
def test_a_few_damaged_files(name: str, good: Path, tmp_path: Path) -> None:
    attack(READERS[name], good, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name: str, good: Path, tmp_path: Path) -> None:
    attack(
        READERS[name], good, tmp_path, MANY if name not in ("summary.json", "page of a trace") else MANY // 4
    )
