"""LoRAs in the names of four kinds of tools: read alike, merged exactly, several at their strengths, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import LORA_MODULES, MINI, State, empty_model, longlive, make_lora, make_state, opened
from safetensors.torch import load_file, save_file

from recap.backbones.wan.checkpoint import load_checkpoint, shapes_of
from recap.backbones.wan.family import SelfForcingConfig
from recap.backbones.wan.lora import LoraChoice, open_lora, read_choice, spell_choice

RANK, ALPHA = 4, 10.0
STATE, LORA = make_state(), make_lora(rank=RANK)
LAYERS = [f"blocks.{layer}.{module}" for layer in range(MINI.layers) for module in LORA_MODULES]
# By hand, from files and converters of these tools; none of it comes from the code under test.
DIFFUSERS = {
    **{f"self_attn.{name}": f"attn1.to_{name}" for name in "qkv"},
    **{f"cross_attn.{name}": f"attn2.to_{name}" for name in "qkv"},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}


def of_diffusers(layer: str) -> str:
    _, number, module = layer.split(".", 2)
    return f"blocks.{number}.{DIFFUSERS[module]}"


def native(folder: Path) -> Path:
    save_file({f"{n}.weight": t for n, t in LORA.items()}, folder / "a.safetensors", {"lora_alpha": "10"})
    return folder / "a.safetensors"


def diffusers(folder: Path) -> Path:
    tensors = {
        f"transformer.{of_diffusers(layer)}.lora_{half}.weight": LORA[f"{layer}.lora_{half}"]
        for layer in LAYERS
        for half in "AB"
    }
    config = {"transformer.r": RANK, "transformer.lora_alpha": 10, "transformer.use_rslora": False}
    path = folder / "pytorch_lora_weights.safetensors"
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(config)})
    return path


def peft_of_diffusers(folder: Path) -> Path:
    tensors = {
        f"base_model.model.{of_diffusers(layer)}.lora_{half}.weight": LORA[f"{layer}.lora_{half}"]
        for layer in LAYERS
        for half in "AB"
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 10}))
    return folder


def _down_up(folder: Path, spell: Callable[[str], str]) -> Path:
    tensors = {}
    for layer in LAYERS:
        tensors[f"{spell(layer)}.lora_down.weight"] = LORA[f"{layer}.lora_A"]
        tensors[f"{spell(layer)}.lora_up.weight"] = LORA[f"{layer}.lora_B"]
        tensors[f"{spell(layer)}.alpha"] = torch.tensor(ALPHA)
    save_file(tensors, folder / "b.safetensors")
    return folder / "b.safetensors"


def comfyui(folder: Path) -> Path:
    return _down_up(folder, lambda layer: f"diffusion_model.{layer}")


def kohya(folder: Path) -> Path:
    return _down_up(folder, lambda layer: "lora_unet_" + layer.replace(".", "_"))


LAYOUTS = {
    "native": native,
    "diffusers": diffusers,
    "ComfyUI": comfyui,
    "kohya": kohya,
}


def reference(strength: float = 1.0, layers: list[str] = LAYERS) -> State:
    state = {name: tensor.double() for name, tensor in STATE.items()}
    for layer in layers:
        change = LORA[f"{layer}.lora_B"].double() @ LORA[f"{layer}.lora_A"].double()
        state[f"{layer}.weight"] += strength * ALPHA / RANK * change
    return state


def merged(folder: Path, *choices: LoraChoice) -> State:
    base = folder / "base"
    base.mkdir(exist_ok=True)
    model, loras = empty_model(), [open_lora(choice, shapes_of(MINI)) for choice in choices]
    load_checkpoint(model, longlive(base, STATE), dtype=torch.float32, loras=loras)
    return model.state_dict()


def assert_equal(found: State, wanted: State) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [*LAYOUTS.values(), peft_of_diffusers], ids=lambda make: make.__name__)
@pytest.mark.parametrize("whole", [True, False])
def test_every_layout_equals_the_merged_reference(
    tmp_path: Path, make: Callable[[Path], Path], whole: bool
) -> None:
    assert_equal(merged(tmp_path, LoraChoice(make(tmp_path), whole=whole)), reference())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_named(tmp_path: Path, name: str) -> None:
    (lora,) = opened(LAYOUTS[name](tmp_path), whole=False)
    assert lora.layout == name
    assert str(lora).endswith(f"({name} names) changes 20 layers, rank 4, alpha 10.0, strength 1")


def test_diffusers_reads_the_same_names(tmp_path: Path) -> None:
    """diffusers' own converters take our ComfyUI and kohya files whole and give its layout, alpha folded in."""
    from diffusers.loaders import lora_conversion_utils as tools

    for make, convert in (
        (comfyui, tools._convert_non_diffusers_wan_lora_to_diffusers),
        (kohya, tools._convert_musubi_wan_lora_to_diffusers),
    ):
        folder = tmp_path / make.__name__
        folder.mkdir()
        path = folder / "theirs.safetensors"
        save_file(convert(load_file(make(folder))), path)
        assert_equal(merged(folder, LoraChoice(path, alpha=float(RANK))), reference())


def test_layers_outside_of_blocks_and_fewer_layers(tmp_path: Path) -> None:
    """A LoRA of one's own may change any linear layer; a model's own LoRA changes all of its blocks."""
    shapes = shapes_of(MINI)
    few = [f"blocks.1.{module}" for module in ("self_attn.q", "ffn.2")]
    tensors = {f"{name}.lora_{half}.weight": LORA[f"{name}.lora_{half}"] for name in few for half in "AB"}
    for name in ("head.head", "time_projection.1", "text_embedding.0"):
        out, inner = shapes[f"{name}.weight"]
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = (
            torch.ones(1, inner),
            torch.ones(out, 1),
        )
    save_file(tensors, tmp_path / "few.safetensors", {"lora_alpha": "1"})
    found = merged(tmp_path, LoraChoice(tmp_path / "few.safetensors"))
    for name, tensor in STATE.items():
        changed = name.removesuffix(".weight") in (*few, "head.head", "time_projection.1", "text_embedding.0")
        assert torch.equal(found[name], tensor) != (changed and name.endswith(".weight"))
    torch.testing.assert_close(found["head.head.weight"], STATE["head.head.weight"] + 1)
    with pytest.raises(ValueError, match="does not change the 20 linear layers"):
        merged(tmp_path, LoraChoice(tmp_path / "few.safetensors", whole=True))


def test_several_at_their_strengths_add_up_and_are_rounded_once(tmp_path: Path) -> None:
    one, two = comfyui(tmp_path), kohya((tmp_path / "other").mkdir() or tmp_path / "other")
    found = merged(tmp_path, LoraChoice(one, 0.75), LoraChoice(two, -0.25))
    assert_equal(found, reference(0.5))
    model = empty_model()
    loras = [*opened(one, whole=False, strength=0.75), *opened(two, whole=False, strength=-0.25)]
    load_checkpoint(model, longlive(tmp_path, STATE), dtype=torch.bfloat16, loras=loras)
    assert all(torch.equal(t, found[name].bfloat16()) for name, t in model.state_dict().items())


def test_a_wrong_layout_names_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "flux.safetensors"
    save_file({"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(4, 8)}, path)
    with pytest.raises(ValueError, match="no change to a linear layer") as refusal:
        opened(path, whole=False)
    for word in (
        "single_transformer_blocks.0.attn.to_q",
        "blocks.0.self_attn.q.lora_A.weight (native)",
        "transformer.blocks.0.attn1.to_q.lora_A.weight (diffusers)",
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight (ComfyUI)",
        "lora_unet_blocks_0_self_attn_q.lora_A.weight (kohya)",
    ):
        assert word in str(refusal.value), word


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"diffusion_model.blocks.0.ffn.0.diff_b": torch.ones(12)},
            ("biases, norms and DoRA are not read", "1 of them (diffusion_model.blocks.0.ffn.0.diff_b)"),
        ),
        (
            {"diffusion_model.blocks.0.norm3.diff": torch.ones(8), "other": torch.ones(1)},
            ("1 unknown (other)", "1 not read", "norm3.diff"),
        ),
        ({"diffusion_model.blocks.7.ffn.0.lora_down.weight": torch.ones(4, 8)}, ("1 unknown", "blocks.7")),
        ({"diffusion_model.blocks.0.ffn.0.lora_down.weight": torch.ones(4, 9)}, ("misshapen", "[4, 9]")),
        (
            {"diffusion_model.blocks.0.ffn.0.dora_scale": torch.ones(12, 1)},
            ("biases, norms and DoRA are not read", "name a LoRA without them"),
        ),
        ({"diffusion_model.head.head.alpha": torch.ones(())}, ("2 missing", "head.head.lora_A.weight")),
        ({"lora_unet_blocks_0_ffn_0.alpha": torch.ones(())}, ("is there twice", "lora_unet_blocks_0_ffn_0")),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: State, words: tuple[str, ...]) -> None:
    tensors = load_file(comfyui(tmp_path)) | change
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="lora is ") as refusal:
        opened(tmp_path / "c.safetensors", whole=False)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("half", ["lora_down", "lora_up"])
def test_factors_that_are_not_finite_are_refused(tmp_path: Path, half: str, value: float) -> None:
    """They were merged, and every picture was NaN."""
    name = f"lora_unet_blocks_1_ffn_2.{half}.weight"
    tensors = load_file(kohya(tmp_path))
    tensors[name][1, 1] = value
    save_file(tensors, tmp_path / "spoiled.safetensors")
    with pytest.raises(ValueError, match=rf"lora is '\S*spoiled\.safetensors'.*{name}.*NaN or infinite"):
        merged(tmp_path, LoraChoice(tmp_path / "spoiled.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_factors_in_8_bit_floats_are_used_as_they_are(
    tmp_path: Path, dtype: torch.dtype, suffix: str
) -> None:
    def halves(kept: Callable[[torch.Tensor], torch.Tensor], path: Path) -> Path:
        tensors = load_file(comfyui(tmp_path))
        made = {name: t if name.endswith("alpha") else kept(t) for name, t in tensors.items()}
        save_file(made, path) if path.suffix == ".safetensors" else torch.save(made, path)
        return path

    stored = halves(lambda t: t.to(dtype), tmp_path / f"eight{suffix}")
    widened = halves(lambda t: t.to(dtype).float(), tmp_path / f"wide{suffix}")
    found = merged(tmp_path, LoraChoice(stored))
    wanted = merged(tmp_path, LoraChoice(widened))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert not any(torch.equal(found[f"{layer}.weight"], STATE[f"{layer}.weight"]) for layer in LAYERS)


def test_a_missing_or_damaged_file_is_not_called_weights_of_the_model(tmp_path: Path) -> None:
    """`recap weights` fetches the LoRA that belongs to a model, and no other."""
    (tmp_path / "damaged.safetensors").write_bytes(comfyui(tmp_path).read_bytes()[:-8])
    for name in ("gone.safetensors", "damaged.safetensors"):
        with pytest.raises(ValueError, match=rf"{name}.*; check the path, or fetch the file again$"):
            opened(tmp_path / name, whole=False)
        with pytest.raises(ValueError, match=rf"{name}.*fetch the weights of this model again$"):
            opened(tmp_path / name, whole=True)
    with pytest.raises(ValueError, match=r"loras is .*; check the path, or fetch the file again$"):
        SelfForcingConfig(loras=(str(tmp_path / "gone.safetensors"),)).added_files()


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_no_layout_is_merged_at_a_guessed_scale(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    tensors = {name: t for name, t in load_file(make(tmp_path)).items() if not name.endswith("alpha")}
    path = tmp_path / "bare.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"its alpha is not known.*bare\.safetensors:alpha=NUMBER.* 4 here"):
        opened(path, whole=False)
    assert_equal(merged(tmp_path, LoraChoice(path, alpha=ALPHA)), reference())


@pytest.mark.parametrize(
    ("text", "path", "strength", "alpha"),
    [
        ("a.safetensors", "a.safetensors", 1.0, None),
        ("a.safetensors:0.8", "a.safetensors", 0.8, None),
        ("folder/a.pt:-1e-1", "folder/a.pt", -0.1, None),
        ("a.pt:alpha=16", "a.pt", 1.0, 16.0),
        ("a.pt:0.5:alpha=16", "a.pt", 0.5, 16.0),
        (r"C:\loras\a.pt", r"C:\loras\a.pt", 1.0, None),
        (r"C:\loras\a.pt:2", r"C:\loras\a.pt", 2.0, None),
        ("~nobody-of-this-name/a.pt", "~nobody-of-this-name/a.pt", 1.0, None),
    ],
)
def test_choices_are_read(text: str, path: str, strength: float, alpha: float | None) -> None:
    choice = read_choice(text)
    assert choice == LoraChoice(Path(path), strength, alpha)
    assert read_choice(spell_choice(choice)) == LoraChoice(Path(path).absolute(), strength, alpha)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":0.5",
        "a.pt:0",
        "a.pt:nan",
        "a.pt:inf",
        "a.pt:-1e300",
        "a.pt:alpha=1e300",
        "a.pt:alpha=0",
        "a.pt:alpha=x",
    ],
)
def test_odd_choices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--lora is "):
        read_choice(text)
