from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from umt5_fakes import TEXT_DIM, TEXT_LEN, make_encoder, make_tokenizer, wan_tensors

from recap.backbones.text import Umt5Tokenizer, _sizes, clean_prompt, load_umt5, wan_name


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_encoder()


@pytest.fixture
def weights(model: Any, tmp_path: Path) -> Path:
    path = tmp_path / "models_t5.pth"
    torch.save(wan_tensors(model), path)
    return path


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  a \t red\n\nfox ", "a red fox"),
        ("fish &amp;amp; chips", "fish & chips"),
        ("&lt;b&gt;", "<b>"),
        ("<b> fish &amp;amp; chips", "<b> fish & chips"),  # ftfy leaves escapes alone where it sees a tag
        ("cafÃ© â€” done", "café — done"),
        ("“quoted”", '"quoted"'),
        ("Lower UPPER", "Lower UPPER"),
        ("a\u00a0\u3000b", "a b"),
        ("&nbsp;", ""),
    ],
)
def test_prompts_are_cleaned(prompt: str, cleaned: str) -> None:
    assert clean_prompt(prompt) == cleaned


def test_cleaning_is_that_of_diffusers_where_ftfy_is_installed() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    for prompt in ("a &amp;lt; b", "  x\n y ", "cafÃ© &#39;n&#39; bar", "日本の 海"):
        assert clean_prompt(prompt) == prompt_clean(prompt)


def test_ftfy_is_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ValueError, match=r"ftfy.*pip install recap-forcing\[wan\]"):
        clean_prompt("a fox")


def test_prompts_are_padded_and_end_with_the_end(tokenizer_folder: Path) -> None:
    tokenize = Umt5Tokenizer(tokenizer_folder, TEXT_LEN, notice=pytest.fail)
    ids, mask = tokenize("a red   fox")
    true = int(mask.sum())
    assert ids.shape == mask.shape == (1, TEXT_LEN) and 3 <= true < TEXT_LEN
    assert ids[0, true - 1] == 1 and (ids[0, : true - 1] > 1).all() and (ids[0, true:] == 0).all()
    assert torch.equal(mask[0, :true], torch.ones(true)) and torch.equal(ids, tokenize(" a red fox ").ids)
    assert int(tokenize("").mask.sum()) == 1


def test_a_prompt_that_is_too_long_is_cut_with_a_notice(tokenizer_folder: Path) -> None:
    notices: list[str] = []
    tokenize = Umt5Tokenizer(tokenizer_folder, TEXT_LEN, notices.append)
    ids, mask = tokenize("a fox walks on a beach by day and " * 3)
    assert mask.sum() == TEXT_LEN and ids[0, -1] == 1
    (line,) = notices
    assert f"the model reads {TEXT_LEN}" in line and "a fox walks" in line


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        Umt5Tokenizer(tmp_path / "google" / "umt5-xxl", TEXT_LEN)
    with pytest.raises(ValueError, match="no tokenizer can be read"):
        Umt5Tokenizer(tmp_path, TEXT_LEN)


def test_the_real_tokenizer(shared_data: Path) -> None:
    """Ids of google/umt5-xxl, as its sentencepiece model gives them by itself."""
    import sentencepiece

    folder = shared_data / "tokenizer" / "umt5-xxl"
    tokenize = Umt5Tokenizer(folder, 512, notice=pytest.fail)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    for prompt in ("a cat walks", "A majestic whale, 日本の海; café — 42 boats!"):
        ids, mask = tokenize(prompt)
        expected = [*pieces.encode(prompt), 1]
        assert ids.shape == (1, 512) and mask.sum() == len(expected)
        assert ids[0].tolist() == expected + [0] * (512 - len(expected))


def test_the_encoder_equals_a_masked_forward_of_transformers(
    model: Any, weights: Path, tokenizer_folder: Path
) -> None:
    tokenize = Umt5Tokenizer(tokenizer_folder, TEXT_LEN)
    encode = load_umt5(weights, TEXT_DIM, dtype=torch.float32)
    for prompt in ("a red fox", "the boat", ""):
        ids, mask = tokenize(prompt)
        made, true = encode(tokenize(prompt)), int(mask.sum())
        direct = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert made.shape == (1, TEXT_LEN, TEXT_DIM)
        assert not made[:, true:].any()
        # What is masked out does not matter: the prompt alone, without any padding, gives the same.
        alone = model(input_ids=ids[:, :true]).last_hidden_state
        assert torch.equal(made[:, :true], alone)
        torch.testing.assert_close(made[:, :true], direct[:, :true], atol=1e-5, rtol=1e-5)
    unmasked = model(input_ids=ids).last_hidden_state
    assert not torch.allclose(made[:, :1], unmasked[:, :1], atol=1e-3)


def test_the_names_of_wans_file(model: Any) -> None:
    names = {wan_name(name) for name in model.state_dict()}
    block = {"norm1", "attn.q", "attn.k", "attn.v", "attn.o", "pos_embedding.embedding", "norm2"}
    block |= {"ffn.gate.0", "ffn.fc1", "ffn.fc2"}
    expected = {f"blocks.{layer}.{part}.weight" for layer in range(3) for part in block}
    assert names == expected | {"token_embedding.weight", "norm.weight"}


def test_the_published_shapes_make_the_published_model() -> None:
    """models_t5_umt5-xxl-enc-bf16.pth has 11,361,920,418 bytes: bf16, and a container of 400 bytes per tensor."""
    from transformers import UMT5Config, UMT5EncoderModel

    square, wide, narrow = (4096, 4096), (10240, 4096), (4096, 10240)
    block = {f"attn.{part}": square for part in "qkvo"} | {"pos_embedding.embedding": (32, 64)}
    block |= {"ffn.gate.0": wide, "ffn.fc1": wide, "ffn.fc2": narrow, "norm1": (4096,), "norm2": (4096,)}
    shapes = {f"blocks.{layer}.{part}.weight": shape for layer in range(24) for part, shape in block.items()}
    shapes |= {"token_embedding.weight": (256384, 4096), "norm.weight": (4096,)}
    found = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    sizes = _sizes(found, Path("t5.pth"), wan_name)
    assert (sizes["num_layers"], sizes["num_heads"], sizes["d_kv"], sizes["d_ff"]) == (24, 64, 64, 10240)
    with torch.device("meta"):
        made = UMT5EncoderModel(UMT5Config(**sizes))
    for name, tensor in made.state_dict().items():
        assert tensor.shape == found[wan_name(name)].shape, name
    container = 11_361_920_418 - 2 * sum(tensor.numel() for tensor in found.values())
    assert 0 < container < 500 * len(found)


def test_gate_and_branch_are_not_swapped() -> None:
    """wi_0 goes through GELU and is Wan's `gate`; swapping it with wi_1 fits every shape."""
    assert wan_name("encoder.block.1.layer.1.DenseReluDense.wi_0.weight") == "blocks.1.ffn.gate.0.weight"


@pytest.mark.parametrize("kept", ["both", "shared", "embed"])
def test_a_diffusers_folder_in_shards(
    model: Any, tmp_path: Path, tokenizer_folder: Path, weights: Path, kept: str
) -> None:
    """Savers keep one name of the table of word vectors, or the other, or both."""
    folder = tmp_path / "wan" / "text_encoder"
    model.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    table = model.shared.weight.clone()
    names = {
        "both": ("shared", "encoder.embed_tokens"),
        "shared": ("shared",),
        "embed": ("encoder.embed_tokens",),
    }
    for index in folder.glob("*.index.json"):
        text = index.read_text()
        shard = next(file for file in folder.glob("*.safetensors") if "shared.weight" in load_file(file))
        assert "encoder.embed_tokens.weight" not in text
        rest = {name: tensor for name, tensor in load_file(shard).items() if name != "shared.weight"}
        save_file({**rest, **{f"{name}.weight": table.clone() for name in names[kept]}}, shard)
    tokens = Umt5Tokenizer(tokenizer_folder, TEXT_LEN)("a red fox")
    expected = load_umt5(weights, TEXT_DIM)(tokens)
    assert expected.dtype == torch.bfloat16
    for place in (tmp_path / "wan", folder):
        assert torch.equal(load_umt5(place, TEXT_DIM)(tokens), expected)


def test_both_names_of_the_word_vectors_are_set(weights: Path) -> None:
    """A release of transformers left the second one empty: prompts were not read, and nothing failed."""
    model = load_umt5(weights, TEXT_DIM)._model
    assert model.shared.weight is model.encoder.embed_tokens.weight
    assert torch.equal(model.shared.weight, torch.load(weights)["token_embedding.weight"].bfloat16())


def test_foreign_and_damaged_weights_are_refused(model: Any, weights: Path, tmp_path: Path) -> None:
    def attempt(**changes: torch.Tensor | None) -> None:
        tensors = {**wan_tensors(model), **{name.replace("__", "."): new for name, new in changes.items()}}
        torch.save({name: new for name, new in tensors.items() if new is not None}, weights)
        load_umt5(weights, TEXT_DIM)

    attempt()
    with pytest.raises(ValueError, match="word vectors are all zero"):
        attempt(token_embedding__weight=torch.zeros(80, TEXT_DIM))
    with pytest.raises(ValueError, match=r"1 missing \(blocks\.1\.norm2\.weight\)"):
        attempt(blocks__1__norm2__weight=None)
    with pytest.raises(ValueError, match=r"1 missing \(blocks\.1\.attn\.q\.weight\)"):
        attempt(blocks__1__attn__q__weight=None)
    with pytest.raises(ValueError, match=r"1 unknown \(head\.weight\)"):
        attempt(head__weight=torch.ones(2, 2))
    with pytest.raises(
        ValueError, match=r"1 misshapen \(blocks\.2\.ffn\.fc1\.weight \[24, 8\] for \[24, 16\]\)"
    ):
        attempt(blocks__2__ffn__fc1__weight=torch.ones(24, 8))
    with pytest.raises(ValueError, match=r"token_embedding\.weight is missing"):
        attempt(token_embedding__weight=None)
    attempt()
    with pytest.raises(ValueError, match="embeddings have 16 channels, and this model reads 4096"):
        load_umt5(weights, 4096)
    with pytest.raises(ValueError, match="no such file"):
        load_umt5(tmp_path / "none.pth", TEXT_DIM)


def test_tables_that_differ_are_refused(model: Any, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["encoder.embed_tokens.weight"] = torch.zeros(80, TEXT_DIM)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must be one table, but differ"):
        load_umt5(tmp_path, TEXT_DIM)
