"""LongLive's low-rank change: merged exactly, and complete or refused."""

from __future__ import annotations

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

from recap.backbones.wan.checkpoint import load_checkpoint, shapes_of
from recap.backbones.wan.lora import LoraChoice, open_lora
from recap.backbones.wan.spec import WAN_1_3B

STATE, LORA = make_state(), make_lora()
FORMS = (
    "base_model.model.{}.weight",
    "base_model.model.{}.default.weight",
    "{}.weight",
    "{}.default.weight",
    "model.base_model.model.{}.weight",
    "base_model.model.model._fsdp_wrapped_module.{}.weight",
)


def merged(scale: float) -> State:
    state = {name: tensor.double() for name, tensor in STATE.items()}
    for layer in range(MINI.layers):
        for module in LORA_MODULES:
            name = f"blocks.{layer}.{module}"
            state[f"{name}.weight"] += (
                scale * LORA[f"{name}.lora_B"].double() @ LORA[f"{name}.lora_A"].double()
            )
    return state


def load(tmp_path: Path, lora: Path, alpha: float | None = 3.0, dtype: torch.dtype = torch.float32) -> State:
    model = empty_model()
    load_checkpoint(model, longlive(tmp_path, STATE), dtype=dtype, loras=opened(lora, alpha))
    return model.state_dict()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_every_form_is_merged(tmp_path: Path, form: str, suffix: str) -> None:
    found = load(tmp_path, save_lora(tmp_path / f"lora{suffix}", LORA, form))
    for name, wanted in merged(1.0).items():
        torch.testing.assert_close(found[name].double(), wanted, atol=1e-5, rtol=1e-5)
    untouched = [
        name for name in STATE if name.removesuffix(".weight").partition("blocks.0.")[2] not in LORA_MODULES
    ]
    assert all(torch.equal(found[name], STATE[name]) for name in untouched if "blocks.1" not in name)


def test_a_bare_dict_and_an_alpha(tmp_path: Path) -> None:
    path = tmp_path / "lora.pt"
    torch.save({FORMS[0].format(name): tensor for name, tensor in LORA.items()}, path)
    found = load(tmp_path, path, alpha=6.0)
    for name, wanted in merged(6.0 / 3).items():
        torch.testing.assert_close(found[name].double(), wanted, atol=1e-5, rtol=1e-5)


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """Adding in bf16 loses small changes to large weights: the sum is made in fp32 and rounded at the end."""
    path = save_lora(tmp_path / "lora.pt", LORA)
    whole, rounded = load(tmp_path, path), load(tmp_path, path, dtype=torch.bfloat16)
    assert all(torch.equal(rounded[name], whole[name].bfloat16()) for name in whole)
    twice = STATE["blocks.0.ffn.0.weight"].bfloat16() + (
        LORA["blocks.0.ffn.0.lora_B"].bfloat16() @ LORA["blocks.0.ffn.0.lora_A"].bfloat16()
    )
    assert not torch.equal(twice, rounded["blocks.0.ffn.0.weight"])


A, B = "blocks.1.cross_attn.o.lora_A", "blocks.1.cross_attn.o.lora_B"
FAULTS = {
    "unpaired": (
        {n: t for n, t in LORA.items() if n != B},
        ("1 missing", "blocks.1.cross_attn.o.lora_B.weight"),
    ),
    "a module less": ({n: t for n, t in LORA.items() if n not in (A, B)}, ("2 missing", A)),
    "a layer less": ({n: t for n, t in LORA.items() if "blocks.0" in n}, ("20 missing", "and 12 more")),
    "a layer more": ({**LORA, "blocks.2.ffn.0.lora_A": torch.ones(3, 8)}, ("1 unknown", "blocks.2.ffn.0")),
    "another module": ({**LORA, "head.head.lora_A": torch.ones(3, 8)}, ("1 unknown", "head.head.lora_A")),
    "a lone alpha": (
        {**LORA, "blocks.0.ffn.0.alpha": torch.ones(())},
        ("19 missing", "blocks.0.ffn.2.alpha"),
    ),
    "an alpha of another module": (
        {**LORA, "head.head.alpha": torch.ones(())},
        ("1 unknown", "head.head.alpha"),
    ),
    "misshapen": ({**LORA, A: torch.ones(3, 9)}, ("misshapen", A, "[3, 9]")),
    "other ranks": ({**LORA, A: torch.ones(2, 8)}, ("misshapen", A, "[2, 8] and [8, 3]")),
    "no rank": ({**LORA, A: torch.ones(0, 8), B: torch.ones(8, 0)}, ("misshapen", A)),
    "a number": ({**LORA, A: torch.ones(())}, ("misshapen", A)),
    "whole numbers": ({**LORA, A: torch.ones(3, 8, dtype=torch.int32)}, ("not floats", A)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lora_at_fault_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    lora, words = FAULTS[fault]
    path = tmp_path / "lora.pt"
    torch.save({n if n.endswith("alpha") else f"{n}.weight": t for n, t in lora.items()}, path)
    with pytest.raises(ValueError, match=r"lora is .*lora\.pt.*20 linear layers") as refusal:
        load(tmp_path, path)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_two_adapters_are_one_too_many(tmp_path: Path) -> None:
    both = {f"{n}.{adapter}.weight": t for n, t in LORA.items() for adapter in ("default", "other")}
    torch.save(both, tmp_path / "lora.pt")
    with pytest.raises(
        ValueError, match=r"lora_A\.other\.weight is there twice, also as \S+lora_A\.default\.weight"
    ):
        load(tmp_path, tmp_path / "lora.pt")


def test_other_faults_are_refused(tmp_path: Path) -> None:
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lora alpha"):
            load(tmp_path, save_lora(tmp_path / "lora.pt", LORA), alpha=alpha)
    torch.save({"generator_lora": 3}, tmp_path / "lora.pt")
    with pytest.raises(ValueError, match="generator_lora is no state dict"):
        load(tmp_path, tmp_path / "lora.pt")


def test_the_counts_of_longlive(tmp_path: Path) -> None:
    """Rank 256 on 300 modules: 349,962,240 parameters."""
    shapes = shapes_of(WAN_1_3B)
    factors = {}
    for layer in range(30):
        for module in LORA_MODULES:
            out, inner = shapes[f"blocks.{layer}.{module}.weight"]
            factors[f"blocks.{layer}.{module}.lora_A"] = torch.zeros(1).expand(256, inner)
            factors[f"blocks.{layer}.{module}.lora_B"] = torch.zeros(1).expand(out, 256)
    lora = open_lora(LoraChoice(save_lora(tmp_path / "lora.pt", factors), alpha=256.0, whole=True), shapes)
    assert (len(lora.factors), lora.describe()["ranks"]) == (300, [256])
    sizes = [torch.Size(half.shape).numel() for pair in lora.factors.values() for half in pair]
    assert (len(sizes), sum(sizes)) == (600, 349_962_240)
