"""Conversion: one file in our names, the manifest that tells its story, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import (
    FORMATS,
    State,
    diffusers_config,
    diffusers_folder,
    empty_model,
    longlive,
    make_lora,
    make_state,
    opened,
    same,
    save_lora,
    self_forcing,
)
from safetensors.torch import load_file, save_file

from recap.backbones.wan.checkpoint import load_checkpoint
from recap.backbones.wan.convert import convert
from recap.backbones.wan.lora import LoraChoice
from recap.backbones.wan.spec import UNTRAINED
from recap.io.report import Reporter

STATE = make_state()


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_every_layout_converts_to_the_same_file(tmp_path: Path, make: Callable[[Path, State], Path]) -> None:
    source, out = make(tmp_path, STATE), tmp_path / "deep" / "out"
    convert(source, out, dtype=torch.float32)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "model.safetensors"]
    # Byte for byte what the library writes, though we write it tensor by tensor.
    save_file(STATE, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_result_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    convert(self_forcing(tmp_path, STATE), tmp_path / "out", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    model = empty_model()
    load_checkpoint(model, tmp_path / "out", dtype=dtype)
    assert same(model, STATE, dtype)
    again = convert(tmp_path / "out", tmp_path / "again", dtype=dtype)
    first, second = (tmp_path / name / "model.safetensors" for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes() and again["key"] is None


def test_the_manifest_tells_where_it_came_from(tmp_path: Path) -> None:
    base, lora = longlive(tmp_path, STATE), save_lora(tmp_path / "lora.pt", make_lora())
    calls: list[tuple[int, int]] = []
    manifest = convert(
        base,
        tmp_path / "out",
        loras=[LoraChoice(lora, alpha=3.0)],
        reporter=Reporter(progress=lambda done, total, rate: calls.append((done, total))),
    )
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == json.loads(json.dumps(manifest))

    def about(file: Path) -> dict[str, object]:
        content = file.read_bytes()
        return {"file": file.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    parameters = sum(tensor.numel() for tensor in STATE.values())
    assert manifest["sources"] == [about(base)]
    found = {"names": "native", "layers": 20, "ranks": [3], "alpha": 3.0, "strength": 1.0}
    assert manifest["loras"] == [{"sources": [about(lora)], **found}]
    assert (manifest["key"], manifest["names"], manifest["dtype"]) == ("generator", "wan", "bfloat16")
    assert (manifest["tensors"], manifest["parameters"], manifest["fits"]) == (len(STATE), parameters, [])
    assert manifest["sizes"]["dim"] == 8 and manifest["sizes"]["layers"] == 2
    total = base.stat().st_size + lora.stat().st_size + 2 * parameters
    assert calls == sorted(calls) and calls[-1] == (total, total)


def test_rows_of_the_same_sizes_are_named(tmp_path: Path) -> None:
    path = self_forcing(tmp_path, make_state(UNTRAINED))
    assert convert(path, tmp_path / "out")["fits"] == ["untrained"]


def test_a_lora_is_merged(tmp_path: Path) -> None:
    base, lora = longlive(tmp_path, STATE), save_lora(tmp_path / "lora.pt", make_lora())
    convert(base, tmp_path / "out", dtype=torch.float32, loras=[LoraChoice(lora, 0.5, 6.0)])
    direct, through = empty_model(), empty_model()
    load_checkpoint(direct, base, dtype=torch.float32, loras=opened(lora, 6.0, strength=0.5))
    load_checkpoint(through, tmp_path / "out", dtype=torch.float32)
    assert same(through, direct.state_dict()) and not same(through, STATE)


def test_heads_are_taken_from_a_config(tmp_path: Path) -> None:
    diffusers_folder(tmp_path, STATE)
    assert convert(tmp_path, tmp_path / "out")["names"] == "diffusers"
    config = tmp_path / "transformer" / "config.json"
    for heads in (3, 0, -2):
        config.write_text(json.dumps({**diffusers_config(), "num_attention_heads": heads}))
        with pytest.raises(ValueError, match="diffusion_pytorch_model"):
            convert(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
    if kind == "folder":
        convert(self_forcing(tmp_path, STATE), out / "model")
        out = out / "model"
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"OUT is .*it is there already"):
        convert(tmp_path / "missing.pt", out)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    source = self_forcing(tmp_path, STATE)

    def stop_late(done: int, total: int | None, rate: float) -> None:
        if done > 0.9 * (total or 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", reporter=Reporter(progress=stop_late))
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
