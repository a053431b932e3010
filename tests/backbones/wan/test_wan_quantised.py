"""8-bit linear layers: how far a weight may move, what a product means, what is refused, how many bytes are left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_fakes import MINI, empty_model, longlive, make_lora, make_state, opened, save_lora
from torch import nn
from torch.nn import functional

from recap.backbones.text import HashedWords
from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.backbones.wan.checkpoint import load_checkpoint
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.quantised import (
    KINDS,
    PRECISIONS,
    Float8Linear,
    Int8Linear,
    QuantisedLinear,
    check_precision,
    count_bytes,
    join_linears,
    quantise,
    quantise_tokens,
)
from recap.backbones.wan.spec import UNTRAINED
from recap.config import RunConfig
from recap.errors import RecapError
from recap.fast.dit import FastWan, Float8Tokens
from recap.run import build_backbone

DTYPES = [torch.float32, torch.bfloat16]


def layer(inputs: int = 48, outputs: int = 32, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    made = nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
    # Channels of very different sizes, and one of zeros.
    made.weight *= torch.logspace(-3, 1, outputs, dtype=dtype).unsqueeze(1)
    made.weight[3] = 0
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int8_weight_is_within_half_a_step_of_its_channel(dtype: torch.dtype) -> None:
    plain = layer(dtype=dtype)
    coded = Int8Linear.of(plain)
    step = plain.weight.float().abs().amax(dim=1, keepdim=True) / 127
    moved = (coded.restore() - plain.weight.float()).abs()
    assert bool((moved <= 0.5001 * step).all())
    assert float((moved / step.clamp(min=1e-9)).max()) > 0.4, "it was rounded"
    assert coded.values.dtype == torch.int8 and bool((coded.values.abs().amax(dim=1)[:3] == 127).all())
    assert not bool(coded.weight[3].any())


def test_an_fp8_number_is_within_a_sixteenth_or_half_of_the_smallest_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, 64) * torch.logspace(-6, 4, 7).unsqueeze(1)
    x[2, 3] = 0
    coded = quantise_tokens(x)
    allowed = torch.maximum(x.abs() / 16, coded.scale * 2**-10)
    assert bool(((coded.restore() - x).abs() <= 1.0001 * allowed).all())
    largest = x.abs().amax(dim=-1)
    torch.testing.assert_close(coded.restore().abs().amax(dim=-1), largest, rtol=1e-6, atol=1e-12)
    assert not bool(coded.restore()[2, 3].any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int8_layer_is_the_product_with_its_restored_weight(dtype: torch.dtype) -> None:
    plain, x = layer(dtype=dtype), torch.randn(2, 6, 48, dtype=dtype)
    coded = Int8Linear.of(plain)
    brute = torch.stack([coded.values[i].float() * coded.scale[i] for i in range(32)]).to(dtype)
    assert torch.equal(coded.weight, brute)
    assert torch.equal(coded(x), functional.linear(x, brute, plain.bias))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", dtype) for dtype in DTYPES]
    + [pytest.param("cuda", dtype, marks=pytest.mark.cuda) for dtype in DTYPES],
)
def test_an_fp8_layer_is_the_product_of_what_was_quantised(device: str, dtype: torch.dtype) -> None:
    plain, x = layer(dtype=dtype).to(device), torch.randn(2, 40, 48, dtype=dtype).to(device)
    coded, tokens = Float8Linear.of(plain), quantise_tokens(x)
    brute = torch.empty(2, 40, 32, dtype=torch.float64, device=device)
    for channel in range(32):
        weight = coded.values[channel].double() * coded.scale[channel].double()
        inputs = tokens.values.double() * tokens.scale.double()
        brute[..., channel] = (inputs * weight).sum(dim=-1) + plain.bias[channel].double()
    # A GPU's own sums of 8-bit products keep fewer digits than fp32.
    digits = 1e-5 if dtype == torch.float32 else 8e-3
    for found in (coded(x), coded(tokens)):
        assert found.dtype == dtype
        error = (found.double() - brute).abs() / brute.abs().amax(dim=(0, 1))
        assert float(error.max()) < digits


@pytest.mark.parametrize("precision", PRECISIONS)
def test_joined_layers_are_their_parts_and_share_storage(precision: str) -> None:
    parts: list[nn.Module] = [layer(outputs=size) for size in (16, 32, 16)]
    if precision != "full":
        parts = [KINDS[precision].of(layer(outputs=size)) for size in (16, 32, 16)]
    x = torch.randn(3, 5, 48)
    before = torch.cat([part(x) for part in parts], dim=-1)
    joined = join_linears(parts)
    torch.testing.assert_close(joined(x), before)
    torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), before)
    name = "weight" if precision == "full" else "values"
    places = {getattr(part, name).untyped_storage().data_ptr() for part in parts}
    assert len(places) == 1, "one storage for all"


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_take_half_of_the_bytes_of_bfloat16(precision: str) -> None:
    def block_bytes(model: CausalWan) -> int:
        found = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in (*model.blocks.parameters(), *model.blocks.buffers())
        }
        return sum(found.values())

    backbone = build_untrained(dtype=torch.bfloat16)
    before, said = block_bytes(backbone.model), list[str]()
    quantise(backbone, precision, said.append)
    left = block_bytes(backbone.model) / before
    # Biases, norms and a scale per channel are the rest: far less where channels have 1,536 inputs instead of 96.
    assert 0.5 < left < 0.58
    FastWan(backbone.model, [1000.0])
    assert block_bytes(backbone.model) / before == pytest.approx(left), (
        "queries, keys and values are kept once"
    )
    assert len(said) == 1 and precision in said[0]
    assert count_bytes(backbone.model) < count_bytes(build_untrained(dtype=torch.bfloat16).model)


def test_full_precision_changes_no_layer() -> None:
    backbone = build_untrained()
    layers = list(backbone.model.modules())
    quantise(backbone, "full", pytest.fail)
    assert all(a is b for a, b in zip(layers, backbone.model.modules(), strict=True))


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_only_the_linear_layers_of_blocks_change(precision: str) -> None:
    backbone = build_untrained()
    quantise(backbone, precision)
    plain = [name for name, each in backbone.model.named_modules() if isinstance(each, nn.Linear)]
    assert plain and not any(name.startswith("blocks.") for name in plain)
    coded = [each for each in backbone.model.modules() if isinstance(each, Int8Linear | Float8Linear)]
    assert len(coded) == 10 * UNTRAINED.layers


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_lora_is_merged_before_weights_are_quantised(tmp_path: Path, precision: str) -> None:
    state, lora, name = make_state(), make_lora(), "blocks.1.cross_attn.v"
    file = save_lora(tmp_path / "lora.safetensors", lora)
    model = empty_model()
    load_checkpoint(model, longlive(tmp_path, state), dtype=torch.float32, loras=opened(file, 6.0))
    backbone = WanBackbone(model, HashedWords(MINI.text_len, MINI.text_dim), pytest.fail)
    quantise(backbone, precision)
    reference = nn.Linear(MINI.dim, MINI.dim)
    change = 2.0 * lora[f"{name}.lora_B"] @ lora[f"{name}.lora_A"]
    reference.load_state_dict({"weight": state[f"{name}.weight"] + change, "bias": state[f"{name}.bias"]})
    found, wanted = backbone.model.get_submodule(name), KINDS[precision].of(reference)
    assert isinstance(found, QuantisedLinear)
    # The scale is that of the merged weight; a value may differ where the merging rounded the last digit otherwise.
    torch.testing.assert_close(found.scale, wanted.scale)
    assert float((found.values.float() != wanted.values.float()).float().mean()) < 0.05
    reference.load_state_dict({"weight": state[f"{name}.weight"], "bias": state[f"{name}.bias"]})
    assert not torch.allclose(found.scale, KINDS[precision].of(reference).scale)


class Other:
    spec = build_untrained().spec


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(
        RecapError, match=r"precision is 'int8': only the models of the Wan family.*choose full"
    ):
        quantise(Other(), "int8")  # type: ignore[arg-type]
    with pytest.raises(RecapError, match=r"precision is 'fp4': no such name.*known: fp8, full, int8"):
        RunConfig.from_dict({"shots": [{"prompt": "a fox", "seconds": 1.0}], "precision": "fp4"})
    with pytest.raises(RecapError, match=r"device mps has no such numbers; choose int8 or full"):
        check_precision("fp8", "mps", "float32")


def test_a_gpu_without_8_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        RecapError, match=r"compute capability 8\.6, and 8-bit products need 8\.9.*choose int8"
    ):
        check_precision("fp8", "cuda", "bfloat16")
    check_precision("int8", "cuda", "bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RecapError, match=r"bfloat16, not float16; add --dtype bfloat16"):
        check_precision("fp8", "cuda", "float16")
    check_precision("fp8", "cuda", "bfloat16")


def test_a_config_builds_its_precision_and_older_records_stay_as_they_are() -> None:
    values = {"shots": [{"prompt": "a fox", "seconds": 1.0}], "backbone": "untrained"}
    assert "precision" not in RunConfig.from_dict(values).to_dict()
    for precision in PRECISIONS:
        config = RunConfig.from_dict({**values, "precision": precision})
        assert RunConfig.from_dict(config.to_dict()).precision == precision
        backbone = build_backbone(config, lambda line: None)
        assert isinstance(backbone, WanBackbone)
        kind = {"full": nn.Linear, "int8": Int8Linear, "fp8": Float8Linear}[precision]
        assert all(isinstance(block.ffn[2], kind) for block in backbone.model.layers())


def test_tokens_pass_between_kernels_in_8_bits() -> None:
    tokens = quantise_tokens(torch.randn(1, 4, 32))
    assert isinstance(tokens, Float8Tokens) and tokens.values.element_size() == 1
    assert tokens.scale.shape == (1, 4, 1)
