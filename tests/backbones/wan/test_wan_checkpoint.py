"""Every published layout fills the model; anything else is refused by file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import (
    FORMATS,
    MINI,
    State,
    bare,
    diffusers_config,
    diffusers_folder,
    empty_model,
    longlive,
    make_state,
    one_safetensors,
    same,
    self_forcing,
    sharded,
)
from safetensors.torch import load_file, save_file
from wan_fakes import fresh

from recap.backbones.wan.checkpoint import fit_tensors, inferred_spec, load_checkpoint, open_checkpoint
from recap.backbones.wan.convert import SIZES
from recap.backbones.wan.spec import UNTRAINED

STATE = make_state()
FP32 = torch.float32


def refused(path: Path | list[Path], *words: str, **options: object) -> str:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the words are checked)
        load_checkpoint(empty_model(), path, dtype=FP32, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refusal.value), str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layout_fills_the_model(
    tmp_path: Path, make: Callable[[Path, State], Path], dtype: torch.dtype
) -> None:
    model = empty_model()
    load_checkpoint(model, make(tmp_path, STATE), dtype=dtype)
    assert same(model, STATE, dtype) and model.dtype == dtype


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_floats_are_converted(tmp_path: Path, stored: torch.dtype) -> None:
    rounded = {name: tensor.to(stored) for name, tensor in STATE.items()}
    model = empty_model()
    load_checkpoint(model, self_forcing(tmp_path, rounded), dtype=FP32)
    assert same(model, rounded)


def test_views_and_transposes_come_out_whole(tmp_path: Path) -> None:
    big = {name: torch.stack((tensor, tensor), -1) for name, tensor in STATE.items()}
    model = empty_model()
    load_checkpoint(model, bare(tmp_path, {name: both[..., 0] for name, both in big.items()}), dtype=FP32)
    assert same(model, STATE) and all(p.is_contiguous() for p in model.parameters())


@pytest.mark.parametrize("make", [self_forcing, one_safetensors])
def test_a_loaded_model_does_not_hang_on_its_file(
    tmp_path: Path, make: Callable[[Path, State], Path]
) -> None:
    """A mapped file shows through in tensors that were not copied."""
    path = make(tmp_path, STATE)
    model = empty_model()
    load_checkpoint(model, path, dtype=FP32)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert same(model, STATE)


def test_a_model_of_diffusers_computes_the_same(tmp_path: Path) -> None:
    """Names alone could be swapped in pairs: what is computed cannot."""
    diffusers = pytest.importorskip("diffusers")
    config = {k: v for k, v in diffusers_config(UNTRAINED).items() if not k.startswith("_")}
    theirs = diffusers.WanTransformer3DModel(**config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "transformer")
    ours = empty_model(UNTRAINED)
    load_checkpoint(ours, tmp_path, dtype=FP32)
    latents = torch.randn(1, 3, UNTRAINED.in_channels, *UNTRAINED.latent_size)
    text = torch.randn(1, UNTRAINED.text_len, UNTRAINED.text_dim)
    with torch.no_grad():
        made = ours(latents, 625.0, ours.condition(text), fresh(UNTRAINED))
        wanted = theirs(latents.transpose(1, 2), torch.tensor([625.0]), text, return_dict=False)[0]
    torch.testing.assert_close(made.transpose(1, 2), wanted, atol=1e-4, rtol=1e-4)


# --- averaged or plain ----------------------------------------------------------------------------------------


def two_sets(path: Path) -> tuple[State, State]:
    averaged, plain = make_state(seed=1), make_state(seed=2)
    torch.save({"generator_ema": averaged, "generator": plain, "critic": {}, "step": 7}, path)
    return averaged, plain


@pytest.mark.parametrize(("ema", "index"), [(None, 0), (True, 0), (False, 1)])
def test_the_choice_of_ema(tmp_path: Path, ema: bool | None, index: int) -> None:
    sets = two_sets(tmp_path / "both.pt")
    model = empty_model()
    load_checkpoint(model, tmp_path / "both.pt", dtype=FP32, ema=ema)
    assert same(model, sets[index])


@pytest.mark.parametrize("ema", [None, False])
def test_longlives_other_top_key_is_read(tmp_path: Path, ema: bool | None) -> None:
    """Its inference also takes {"model": state dict}, where there is no generator."""
    path, model = tmp_path / "home-made.pt", empty_model()
    torch.save({"model": STATE, "step": 7}, path)
    load_checkpoint(model, path, dtype=FP32, ema=ema)
    assert same(model, STATE)
    assert open_checkpoint(path, ema).key == "model"
    refused(path, "no generator_ema", "keys are model, step", ema=True)
    torch.save({"model": make_state(seed=1), "generator": STATE}, path)
    assert open_checkpoint(path, ema).key == "generator"


def test_what_is_not_there_cannot_be_chosen(tmp_path: Path) -> None:
    refused(self_forcing(tmp_path, STATE), "has no generator;", "generator_ema", "self_forcing", ema=False)
    refused(longlive(tmp_path, STATE), "no generator_ema", "keys are generator", "longlive_base", ema=True)
    for make in (bare, one_safetensors):
        for ema in (True, False):
            refused(make(tmp_path, STATE), "one set of weights", ema=ema)


def test_a_file_without_a_generator_says_what_it_has(tmp_path: Path) -> None:
    torch.save({"critic": STATE, "step": 3}, tmp_path / "critic.pt")
    refused(tmp_path / "critic.pt", "none of generator_ema, generator and model", "critic, step")


# --- tensors at fault -----------------------------------------------------------------------------------------


def changed(**changes: torch.Tensor | None) -> State:
    state = {**STATE, **{name: t for name, t in changes.items() if t is not None}}
    return {name: tensor for name, tensor in state.items() if changes.get(name, 0) is not None}


Q = "blocks.1.self_attn.q.weight"
FAULTS: dict[str, tuple[State, tuple[str, ...]]] = {
    "missing": (changed(**{Q: None}), ("1 missing", Q)),
    "extra": (changed(**{"blocks.1.self_attn.k_img.weight": torch.ones(8, 8)}), ("1 unknown", "k_img")),
    "renamed": (changed(**{Q: None, Q + "s": STATE[Q]}), ("1 missing", "1 unknown", Q + "s")),
    "misshapen": (changed(**{Q: torch.ones(8, 9)}), ("1 misshapen", Q, "[8, 9] for [8, 8]")),
    "rank": (changed(**{Q: torch.ones(8, 8, 1)}), ("1 misshapen", Q, "[8, 8, 1]")),
    "swapped": (
        changed(
            **{
                "blocks.0.ffn.0.weight": STATE["blocks.0.ffn.2.weight"],
                "blocks.0.ffn.2.weight": STATE["blocks.0.ffn.0.weight"],
            }
        ),
        ("2 misshapen", "blocks.0.ffn.0.weight", "[8, 12] for [12, 8]"),
    ),
    "whole numbers": (changed(**{Q: torch.ones(8, 8, dtype=torch.int64)}), ("1 not floats", Q, "64")),
    "eight bits": (changed(**{Q: torch.ones(8, 8).to(torch.float8_e4m3fn)}), ("1 not floats", Q)),
    "no blocks": ({n: t for n, t in STATE.items() if "blocks" not in n}, ("54 missing", "and 46 more")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [self_forcing, one_safetensors, sharded])
def test_tensors_at_fault_are_named(tmp_path: Path, fault: str, make: Callable[[Path, State], Path]) -> None:
    state, words = FAULTS[fault]
    path = make(tmp_path, state)
    message = refused(path, "mini", *words)
    assert (path.parent if make is sharded else path).name in message


def test_names_in_errors_are_those_of_the_file(tmp_path: Path) -> None:
    diffusers_folder(tmp_path, STATE)
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    moved = state.pop("blocks.0.norm2.weight")
    save_file({**state, "blocks.0.norm3.weight": moved}, file)
    refused(tmp_path, "1 missing (blocks.0.norm2.weight)", "1 unknown (blocks.0.norm3.weight)")


def test_what_is_no_plain_tensor_is_named(tmp_path: Path) -> None:
    for wrong in (5, "text", STATE[Q].to_sparse(), torch.empty(8, 8, device="meta"), None, {"a": 1}):
        torch.save({"generator_ema": {**STATE, Q: wrong}}, tmp_path / "x.pt")
        refused(tmp_path / "x.pt", "x.pt", f"({Q})")
    torch.save({**STATE, "step": 5}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "(step)")


def test_one_tensor_twice_is_refused(tmp_path: Path) -> None:
    torch.save({"generator": {**STATE, f"model.{Q}": STATE[Q]}}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "twice", f"model.{Q}", "x.pt")
    folder = tmp_path / "variants"
    folder.mkdir()
    for name in ("part", "part.fp16"):
        save_file(STATE, folder / f"{name}.safetensors")
    refused(folder, "twice", "part.safetensors")


# --- files at fault -------------------------------------------------------------------------------------------


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    refused(tmp_path / "none.pt", "none.pt", "no such file")
    refused(tmp_path, str(tmp_path), "no .safetensors")
    (tmp_path / "folder.pt").mkdir()
    refused(tmp_path / "folder.pt", "folder.pt", "no .safetensors")
    (tmp_path / "notes.txt").write_text("words")
    refused(tmp_path / "notes.txt", "notes.txt", "ends in none of")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "holds a list"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "points at"),
        ('{"weight_map": {"a": "x.pt"}}', "points at"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_an_index_at_fault_is_named(tmp_path: Path, content: str, words: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    refused(index, words, index.name)
    refused(tmp_path, words, index.name)


def test_two_models_in_a_folder_are_a_question(tmp_path: Path) -> None:
    sharded(tmp_path, STATE, "high")
    sharded(tmp_path, STATE, "low")
    refused(tmp_path, "several models", "high.safetensors.index.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 4),
        ("num_layers", 3),
        ("eps", 1e-5),
        ("cross_attn_norm", False),
        ("qk_norm", None),
        ("patch_size", [1, 1, 1]),
        ("image_dim", 1280),
    ],
)
def test_a_config_that_differs_is_refused(tmp_path: Path, key: str, value: object) -> None:
    diffusers_folder(tmp_path, STATE)
    config = tmp_path / "transformer" / "config.json"
    config.write_text(json.dumps({**diffusers_config(), key: value}))
    refused(tmp_path, key, "config.json", "transformer")
    config.write_text("{")
    refused(tmp_path, "config.json", "not JSON")


# --- sizes read from the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_sizes_are_read_from_the_shapes(tmp_path: Path, make: Callable[[Path, State], Path]) -> None:
    checkpoint = open_checkpoint(make(tmp_path, STATE), None)
    spec = inferred_spec(checkpoint)
    assert [getattr(spec, name) for name in SIZES] == [getattr(MINI, name) for name in SIZES]
    assert fit_tensors(checkpoint, spec).keys() == STATE.keys()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"conv1.weight": torch.ones(3, 3)}, "no patch_embedding.weight, but 1 tensors (conv1.weight)"),
        (changed(**{"patch_embedding.weight": torch.ones(8, 8)}), "patch_embedding.weight has the shape"),
        (changed(**{"head.head.weight": torch.ones(0, 8)}), "head.head.weight has the shape"),
        (changed(**{"patch_embedding.weight": torch.ones(8, 36, 1, 2, 2)}), "text-to-video"),
        (changed(**{"text_embedding.0.weight": torch.ones(1).expand(8, 1 << 21)}), "text_embedding.0.weight"),
    ],
)
def test_other_networks_are_no_wan(tmp_path: Path, state: State, words: str) -> None:
    path = tmp_path / "x.pt"
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"x\.pt") as refusal:
        inferred_spec(open_checkpoint(path, None))
    assert words in str(refusal.value)
