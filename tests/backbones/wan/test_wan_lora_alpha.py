"""A LoRA's alpha: read where trainers write it, equal wherever it stands, refused where it cannot be known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import (
    LORA_MODULES,
    MINI,
    State,
    empty_model,
    longlive,
    make_lora,
    make_state,
    opened,
    save_lora,
)
from safetensors.torch import save_file

from recap.backbones.wan.checkpoint import load_checkpoint
from recap.backbones.wan.convert import convert
from recap.backbones.wan.lora import LoraChoice
from recap.backbones.wan.published import SETS, PublicFile

STATE, LORA = make_state(), make_lora(rank=4)
WEIGHTS = {f"base_model.model.{name}.weight": tensor for name, tensor in LORA.items()}
MODULES = [f"blocks.{layer}.{module}" for layer in range(MINI.layers) for module in LORA_MODULES]
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "alpha_pattern": {}}


def merged(scale: Callable[[str], float]) -> State:
    state = {name: tensor.double() for name, tensor in STATE.items()}
    for name in MODULES:
        change = LORA[f"{name}.lora_B"].double() @ LORA[f"{name}.lora_A"].double()
        state[f"{name}.weight"] += scale(name) * change
    return state


def load(folder: Path, lora: Path, alpha: float | None = None) -> State:
    base = folder / "base"
    base.mkdir(exist_ok=True)
    model = empty_model()
    load_checkpoint(model, longlive(base, STATE), dtype=torch.float32, loras=opened(lora, alpha))
    return model.state_dict()


def assert_scaled(found: State, scale: Callable[[str], float]) -> None:
    for name, wanted in merged(scale).items():
        torch.testing.assert_close(found[name].double(), wanted, atol=1e-5, rtol=1e-5)


def peft_folder(folder: Path, config: dict[str, object]) -> Path:
    adapter = folder / "adapter"
    adapter.mkdir()
    save_file(WEIGHTS, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def safetensors(folder: Path, tensors: State, metadata: dict[str, str]) -> Path:
    save_file(tensors, folder / "lora.safetensors", metadata=metadata)
    return folder / "lora.safetensors"


def alpha_tensors(alpha: Callable[[str], float], dtype: torch.dtype = torch.float32) -> State:
    return {f"base_model.model.{name}.alpha": torch.tensor(alpha(name), dtype=dtype) for name in MODULES}


def test_a_peft_folder_is_merged_at_its_own_scale(tmp_path: Path) -> None:
    """Alpha 8 at rank 4 is scale 2; before alpha was read it was silently 1."""
    folder = peft_folder(tmp_path, PEFT)
    assert_scaled(load(tmp_path, folder), lambda _: 2.0)
    assert_scaled(load(tmp_path, folder / "adapter_model.safetensors"), lambda _: 2.0)
    manifest = convert(longlive(tmp_path / "base", STATE), tmp_path / "out", loras=[LoraChoice(folder)])
    assert manifest["loras"][0]["alpha"] == 8.0


@pytest.mark.parametrize(
    "metadata",
    [
        {"lora_alpha": "8"},
        {"ss_network_alpha": "8.0", "ss_network_dim": "4"},
        {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})},
        {"lora_adapter_metadata": json.dumps(PEFT), "lora_alpha": "8"},
    ],
    ids=str,
)
def test_alpha_is_read_from_the_metadata(tmp_path: Path, metadata: dict[str, str]) -> None:
    assert_scaled(load(tmp_path, safetensors(tmp_path, WEIGHTS, metadata)), lambda _: 2.0)


def test_alpha_is_read_from_tensors_layer_by_layer(tmp_path: Path) -> None:
    def alpha(name: str) -> float:
        return 2.0 if "ffn" in name else 12.0

    path = safetensors(tmp_path, {**WEIGHTS, **alpha_tensors(alpha)}, {})
    assert_scaled(load(tmp_path, path), lambda name: alpha(name) / 4)
    manifest = convert(longlive(tmp_path, STATE), tmp_path / "out", loras=[LoraChoice(path)])
    assert manifest["loras"][0]["alpha"] == [2.0, 12.0]
    torch.save({**WEIGHTS, **alpha_tensors(alpha)}, tmp_path / "lora.pt")
    assert_scaled(load(tmp_path, tmp_path / "lora.pt"), lambda name: alpha(name) / 4)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_alpha_nobody_tells_is_refused(tmp_path: Path, suffix: str) -> None:
    path = save_lora(tmp_path / f"lora{suffix}", LORA)
    with pytest.raises(ValueError, match=r"its alpha is not known.*:alpha=NUMBER.*the rank, which is 4 here"):
        load(tmp_path, path)
    assert_scaled(load(tmp_path, path, alpha=8.0), lambda _: 2.0)
    # A trainer writes None where nobody set it.
    told_nothing = safetensors(tmp_path, WEIGHTS, {"ss_network_alpha": "None"})
    with pytest.raises(ValueError, match="its alpha is not known"):
        load(tmp_path, told_nothing)


def test_sources_that_disagree_are_refused(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path, PEFT)
    with pytest.raises(
        ValueError, match=r"lora_alpha says 4, adapter_config\.json says 8 .*leave lora_alpha"
    ):
        load(tmp_path, folder, alpha=4.0)
    assert_scaled(load(tmp_path, folder, alpha=8.0), lambda _: 2.0)
    path = safetensors(tmp_path, {**WEIGHTS, **alpha_tensors(lambda _: 8.0)}, {"ss_network_alpha": "4"})
    with pytest.raises(
        ValueError, match=r"\.alpha tensors says 8, ss_network_alpha of lora\.safetensors says 4"
    ):
        load(tmp_path, path)
    # Tensors in bfloat16 are rounded; that is no contradiction.
    path = safetensors(tmp_path, {**WEIGHTS, **alpha_tensors(lambda _: 8.03, torch.bfloat16)}, {})
    assert_scaled(load(tmp_path, path, alpha=8.03), lambda _: 8.03 / 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_rslora": True}, "use_rslora is True"),
        ({"use_dora": True}, "use_dora is True"),
        ({"alpha_pattern": {"ffn": 2}}, "alpha_pattern is"),
        ({"r": 8}, "r is 8: adapter_config.json is about a LoRA of another rank than 4"),
        ({"lora_alpha": "8"}, "lora alpha is '8'"),
        ({"lora_alpha": 0}, "lora alpha is 0"),
        ({"lora_alpha": True}, "lora alpha is True"),
        ({"lora_alpha": 10**400}, "at most 1,000,000"),
        ({"lora_alpha": 1e308}, "at most 1,000,000"),
        ({"r": [4]}, r"r is \[4\]"),
    ],
)
def test_configs_that_scale_otherwise_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load(tmp_path, peft_folder(tmp_path, {**PEFT, **change}))


def test_a_config_next_to_several_files_is_about_the_one_peft_wrote(tmp_path: Path) -> None:
    """The alpha of another LoRA in the folder would be silently wrong."""
    folder = peft_folder(tmp_path, PEFT)
    save_file(WEIGHTS, folder / "style.safetensors")
    assert_scaled(load(tmp_path, folder / "adapter_model.safetensors"), lambda _: 2.0)
    with pytest.raises(ValueError, match="its alpha is not known"):
        load(tmp_path, folder / "style.safetensors")


def test_damaged_sources_are_refused(tmp_path: Path) -> None:
    path = safetensors(tmp_path, WEIGHTS, {"lora_adapter_metadata": "{"})
    with pytest.raises(ValueError, match="lora_adapter_metadata is no JSON object"):
        load(tmp_path, path)
    path = safetensors(tmp_path, {**WEIGHTS, **alpha_tensors(lambda _: float("nan"))}, {})
    with pytest.raises(ValueError, match="lora alpha is nan"):
        load(tmp_path, path)
    wide = {name: tensor.expand(2).contiguous() for name, tensor in alpha_tensors(lambda _: 1.0).items()}
    with pytest.raises(ValueError, match="misshapen"):
        load(tmp_path, safetensors(tmp_path, {**WEIGHTS, **wide}, {}))


def test_a_published_file_is_known_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongLive's says no alpha, its authors' config does: a copy is recognised, a file of the same size is not."""
    assert SETS["longlive"].lora_alpha == 256.0
    path = save_lora(tmp_path / "copy.pt", LORA)
    content = path.read_bytes()
    published = PublicFile("x/y", "lora.pt", len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(SETS, "longlive", replace(SETS["longlive"], lora=published, lora_alpha=8.0))
    assert_scaled(load(tmp_path, path), lambda _: 2.0)
    other = {name: tensor + 1 for name, tensor in LORA.items()}
    lookalike = save_lora(tmp_path / "copy.pt", other)
    assert lookalike.stat().st_size == len(content)
    with pytest.raises(ValueError, match="its alpha is not known"):
        load(tmp_path, lookalike)
