"""Readers of files survive anything: damaged and rewritten files are read or refused, and nothing else happens.

Each case changes a good file, either its bytes or, for JSON, its values, and gives it to the reader. Only a refusal
in our words (RecapError) or the system's (OSError) may come out; any other error, or more than ten seconds, is a
failure. A few cases of each reader run with every test run, thousands in slow mode.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from recap import generate
from recap.backbones.wan.backbone import build_untrained
from recap.backbones.wan.checkpoint import fit_tensors, open_checkpoint, read_tensors
from recap.backbones.wan.lora import LoraChoice, open_lora
from recap.config import RunConfig, read_json
from recap.errors import RecapError
from recap.io.cast import read_cast, write_cast
from recap.io.opening import read_opening
from recap.io.trace import read_seconds, read_trace, replay_bank
from recap.io.video import ClipWriter, join_clips, open_clip
from recap.plan import make_plan
from recap.run import read_record, read_spec
from recap.show.comparison import RECORD, _claim, _with_recorded_flow
from recap.show.result import Run
from recap.show.run_page import read_summary, write_run_page
from recap.show.sheet import write_png
from recap.tables.folder import begun_with, check_folder
from recap.tables.page import write_report
from recap.tables.runner import ResultStore
from tests.io.test_cast import subject_of

FEW, MANY = 12, 900
LONGEST_S = 10.0
UNTRAINED = build_untrained()
SPEC = UNTRAINED.spec
SHAPES = {name: tensor.shape for name, tensor in UNTRAINED.model.state_dict().items()}
ODD = st.sampled_from(
    [None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, math.inf, -math.inf,
     math.nan, "", "x", "recap", "../../etc/passwd", "\x00", "\ud800", "<b>", "9" * 5000, [], {}, [[]], [None],
     [[[[]]]], [-1], ["x"], {"name": "x"}, {"": None}, [1e400], ["a"] * 300]
)  # fmt: skip


@st.composite
def edits_of_bytes(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """Draw a few changes of bytes: flipped, cut, cut out, doubled or overwritten."""
    kinds = st.sampled_from(["flip", "cut", "remove", "double", "zero", "write"])
    where = st.floats(0, 1, exclude_max=True)
    changes = draw(
        st.lists(st.tuples(kinds, where, st.integers(1, 64), st.binary(max_size=16)), min_size=1, max_size=4)
    )

    def change(data: bytes) -> bytes:
        for kind, share, length, new in changes:
            at = int(share * len(data))
            part = data[at : at + length]
            replaced = {
                "flip": bytes(byte ^ length for byte in part[:1]) + part[1:],
                "cut": b"",
                "remove": b"",
                "double": part + part,
                "zero": bytes(len(part)),
                "write": new,
            }[kind]
            data = data[:at] + replaced + (b"" if kind == "cut" else data[at + length :])
        return data

    return change


@st.composite
def edits_of_values(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """Draw a few changes of JSON, or of lines of JSON: a value replaced, removed, doubled or put one level deeper."""
    steps = st.lists(st.integers(0, 30), min_size=1, max_size=7)
    kinds = st.sampled_from(["replace", "replace", "replace", "remove", "double", "nest", "swap"])
    changes = draw(st.lists(st.tuples(steps, kinds, ODD), min_size=1, max_size=3))

    def change(data: bytes) -> bytes:
        text = data.decode()
        whole = text.count("\n{") > 0 and text.startswith("{") and not text.startswith("{\n")
        found = [json.loads(line) for line in text.splitlines()] if whole else json.loads(text)
        box = [found]
        for path, kind, odd in changes:
            _change_at(box, [0, *path], kind, copy.deepcopy(odd))
        if not box:
            return b""
        if whole and isinstance(box[0], list):
            return "".join(json.dumps(line) + "\n" for line in box[0]).encode()
        return json.dumps(box[0]).encode()

    return change


def _change_at(node: Any, path: list[int], kind: str, odd: Any) -> None:
    """Follow a path of numbers, each modulo the size of its node, and change what is there."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = keys[path[0] % len(keys)]
        path = path[1:]
        if not path or not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    if kind == "remove":
        del node[key]
    elif kind == "nest":
        node[key] = [node[key]]
    elif kind == "double" and isinstance(node, list):
        node.append(node[key])
    elif kind == "swap":
        other = keys[-1]
        node[key], node[other] = node[other], node[key]
    else:
        node[key] = odd


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
    write_report(file.parent.parent)
    check_folder(file.parent, {}, ["recap"])


def _table_record(file: Path) -> None:
    begun_with(file.parent)
    check_folder(file.parent, {"table": "reappearance", "prompts": 2, "seeds": 2}, ["recap"])


def _comparison(file: Path) -> None:
    config = RunConfig.from_dict({"shots": [{"prompt": "a", "seconds": 1}], "backbone": "untrained"})
    _with_recorded_flow(config, file.parent)
    _claim(file.parent, {"recap": config})


JSON_LIKE, BYTES = (edits_of_values, edits_of_bytes), (edits_of_bytes,)
READERS: dict[str, tuple[str, Callable[[Path], object], tuple[Any, ...]]] = {
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
    "safetensors": ("model.safetensors", _checkpoint, BYTES),
    "torch file": ("model.pt", _checkpoint, BYTES),
    "LoRA": ("lora.pt", _read_lora, BYTES),
    "LoRA in safetensors": ("lora.safetensors", _read_lora, BYTES),
    "cast": ("two.cast", read_cast, BYTES),
}


def attack(name: str, good: Path, place: Path, cases: int) -> None:
    """Try so many damaged files on one reader."""
    source, read, kinds = READERS[name]
    original = (good / source).read_bytes()
    folder = place / "files"
    folder.mkdir()
    if source.startswith("run/"):
        for file in (good / "run").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    file = folder / Path(source).name
    slowest = 0.0

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(*(kind() for kind in kinds)))
    def one_case(change: Callable[[bytes], bytes]) -> None:
        nonlocal slowest
        try:
            data = change(original)
        except UnicodeEncodeError:
            return
        file.write_bytes(data)
        began = time.monotonic()
        with suppress(RecapError, OSError):
            read(file)
        slowest = max(slowest, time.monotonic() - began)

    one_case()
    assert slowest < LONGEST_S


@pytest.mark.parametrize("name", READERS)
def test_a_few_damaged_files(name: str, good: Path, tmp_path: Path) -> None:
    attack(name, good, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name: str, good: Path, tmp_path: Path) -> None:
    attack(name, good, tmp_path, MANY if name not in ("summary.json", "page of a trace") else MANY // 4)
