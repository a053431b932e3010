"""Runs in 8 bits: both paths, resumption, what a record says, what `recap bench` compares with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from recap.attention.context import BlockContext
from recap.backbones.noise import block_noise
from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.backbones.wan.quantised import (
    E4M3,
    LARGEST_FLOAT8,
    Float8Linear,
    Float8Tokens,
    quantise,
    quantise_tokens,
)
from recap.backbones.wan.spec import EMBEDDED, UNTRAINED, WanSpec
from recap.config import RunConfig
from recap.errors import RecapError
from recap.fast.backbone import FastWanBackbone
from recap.fast.speed import SpeedSettings, compare_paths, make_parts
from recap.io.report import SILENT, Reporter
from recap.memory.sink import SinkConfig
from recap.plan import Shot, make_plan
from recap.registry import load_backbone
from recap.run import generate, resume
from recap.tables.ask import Ask
from recap.tables.recipes import find_recipe
from recap.tables.runs import plan_runs

# In fp8 a rounding of the last digit moves a value by a whole step, an eighth of it, so that two paths drift apart as
# far as both are from full precision.
LIMITS = {("int8", "float32"): 1e-5, ("int8", "bfloat16"): 2e-2, "fp8": 5e-2}
GPU = pytest.mark.cuda
# Sizes of which one kernel computes the wide layer, and others.
PLACES = [
    ("cpu", "float32", UNTRAINED),
    pytest.param("cuda", "float32", UNTRAINED, marks=GPU),
    pytest.param("cuda", "bfloat16", UNTRAINED, marks=GPU),
    pytest.param("cuda", "bfloat16", EMBEDDED, marks=GPU),
]


def first_block(backbone: WanBackbone) -> torch.Tensor:
    spec = backbone.spec
    policy = SinkConfig(reinforcement=5.0).build(spec, pytest.fail)
    (block, *_) = make_plan([[Shot("a fox on a beach by day", 1.0)]], spec).blocks
    context = BlockContext(policy, policy.begin(block))
    return backbone.denoise(block_noise(spec, [0], block), backbone.condition(block.prompts), context)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize(("device", "dtype", "spec"), PLACES)
def test_both_paths_generate_in_8_bits(precision: str, device: str, dtype: str, spec: WanSpec) -> None:
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    full = build_untrained(device=device, spec=spec)
    coded = build_untrained(device=device, dtype=kind, spec=spec)
    quantise(coded, precision)
    meant, readable, fast = (first_block(each).float() for each in (full, coded, FastWanBackbone(coded)))
    limit = LIMITS["fp8" if precision == "fp8" else (precision, dtype)]
    if device == "cuda" and dtype == "float32":
        limit = max(limit, 1e-3)
    assert float((fast - readable).norm() / readable.norm()) < limit
    for found in (readable, fast):
        assert 1e-4 < float((found - meant).norm() / meant.norm()) < 0.1


@torch.no_grad()
def test_a_scale_that_is_known_before_the_product_is_nearly_as_good_on_trained_weights() -> None:
    """What one kernel for the wide layer and its GELU does, instead of looking for each token's largest value."""
    backbone = load_backbone("embedded")
    checked: list[int] = []

    def check(layer: torch.nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor) -> None:
        assert isinstance(layer, torch.nn.Linear)
        factor, least = Float8Linear.of(layer).reach
        scale = quantise_tokens(inputs[0]).scale * factor + least
        wide = functional.gelu(out, approximate="tanh")
        assert bool((wide.abs() <= LARGEST_FLOAT8 * scale).all())
        before = Float8Tokens((wide / scale).to(E4M3), scale).restore()
        errors = [float((each - wide).norm()) for each in (before, quantise_tokens(wide).restore())]
        assert errors[0] < 1.15 * errors[1]
        checked.append(1)

    assert isinstance(backbone, WanBackbone)
    for block in backbone.model.layers():
        block.ffn[0].register_forward_hook(check)
    first_block(backbone)
    assert len(checked) == EMBEDDED.layers * len(EMBEDDED.steps)


def config(**changes: Any) -> RunConfig:
    shots = [{"prompt": "a red boat", "seconds": 2.0}]
    return RunConfig.from_dict(
        {"shots": shots, "backbone": "untrained", "flow": "classical", "device": "cpu", **changes}
    )


class Stop(Exception):
    pass


def stop_after_one(done: int, total: int, rate: float) -> None:
    if done == 1 and rate:
        raise Stop


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_run_is_resumed_in_its_own_precision(tmp_path: Path, precision: str) -> None:
    asked = config(precision=precision)
    generate(asked, tmp_path / "whole", reporter=SILENT)
    with pytest.raises(Stop):
        generate(asked, tmp_path / "stopped", reporter=Reporter(lambda line: None, stop_after_one))
    record = tmp_path / "stopped" / "run.json"
    about = json.loads(record.read_text())
    assert about["config"]["precision"] == precision
    other = {**about, "config": {**about["config"], "precision": "full"}}
    record.write_text(json.dumps(other))
    with pytest.raises(RecapError, match=r"manifest\.jsonl"):
        resume(tmp_path / "stopped", reporter=SILENT)
    record.write_text(json.dumps(about))
    resume(tmp_path / "stopped", reporter=SILENT)
    for name in ("latents.safetensors", "trace.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_8_bits_are_compared_with_float32() -> None:
    settings = SpeedSettings("untrained", "sink", "full", "cpu", "float32", 2)
    found = {
        precision: compare_paths(make_parts(asked), asked)
        for precision in ("full", "int8", "fp8")
        for asked in [replace(settings, precision=precision)]
    }
    errors = [each["largest_relative_error"] for each in found.values()]
    assert errors[0] < 1e-5 < 1e-4 < errors[1] < errors[2] < 0.1
    assert found["full"]["limit"] == 1e-3 and found["fp8"]["limit"] is None
    assert "float32" in found["fp8"]["against"]


def test_the_table_of_precisions_asks_for_each_and_renames_no_older_run() -> None:
    ask = Ask(prompts=1, seeds=1, device="cpu")
    runs = list(plan_runs(find_recipe("precision"), ask))
    assert [run.config.precision for run in runs] == ["full", "int8", "fp8"]
    assert "precision" not in runs[0].job.data["config"]
    assert runs[1].job.data["config"]["precision"] == "int8"
    same = {run.job.key for run in plan_runs(find_recipe("components"), ask)}
    assert [run.job.key in same for run in runs] == [True, False, False]
