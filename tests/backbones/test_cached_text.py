from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from umt5_fakes import TEXT_DIM, TEXT_LEN, make_encoder, make_tokenizer, wan_tensors

import recap.backbones.text
from recap.backbones.text import CachedText, Umt5Tokenizer, encoder_identity, load_prompt_embeds, load_umt5


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An encoder file and a tokenizer folder."""
    folder = tmp_path_factory.mktemp("parts")
    torch.save(wan_tensors(make_encoder()), folder / "t5.pth")
    return folder / "t5.pth", make_tokenizer(folder / "tokenizer")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every encoder that is loaded, without keeping it alive."""
    made: list[weakref.ref[Any]] = []

    def load(*arguments: Any) -> Any:
        encoder = load_umt5(*arguments)
        made.append(weakref.ref(encoder._model))
        return encoder

    monkeypatch.setattr(recap.backbones.text, "load_umt5", load)
    return made


def open_text(parts: tuple[Path, Path], cache: Path, notice: Any = pytest.fail) -> CachedText:
    return CachedText(*parts, cache, text_len=TEXT_LEN, text_dim=TEXT_DIM, notice=notice)


def test_several_prompts_take_one_load_and_the_encoder_goes(
    parts: tuple[Path, Path], tmp_path: Path, loads: list[Any]
) -> None:
    text = open_text(parts, tmp_path)
    text.prepare(["a red fox", "the boat", "a red fox"])
    assert len(loads) == 1 and loads[0]() is None, "the encoder is freed"
    tokenize, encode = Umt5Tokenizer(parts[1], TEXT_LEN), load_umt5(parts[0], TEXT_DIM)
    for prompt in ("a red fox", "the boat"):
        made = text(prompt)
        assert made.shape == (1, TEXT_LEN, TEXT_DIM) and made.dtype == torch.bfloat16
        assert torch.equal(made, encode(tokenize(prompt)))
    assert len(loads) == 1 and len(list(tmp_path.iterdir())) == 2
    text("a whale")
    assert len(loads) == 2 and loads[1]() is None
    for kept in tmp_path.iterdir():
        kept.unlink()
    text.prepare(["a red fox", "a whale"])
    assert len(loads) == 2, "what a run has read it holds"


def test_a_second_run_never_loads_the_encoder(
    parts: tuple[Path, Path], tmp_path: Path, loads: list[Any]
) -> None:
    first = open_text(parts, tmp_path)("a red fox")
    again = open_text(parts, tmp_path)
    again.prepare(["a red fox", "  a   red fox\n"])
    assert torch.equal(again("a red fox"), first) and torch.equal(again("  a   red fox\n"), first)
    assert len(loads) == 1


def test_only_what_is_missing_is_encoded(parts: tuple[Path, Path], tmp_path: Path, loads: list[Any]) -> None:
    open_text(parts, tmp_path).prepare(["a red fox"])
    (kept,) = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    open_text(parts, tmp_path).prepare(["a red fox", "the boat"])
    assert kept.stat().st_mtime_ns == before and len(list(tmp_path.iterdir())) == 2 and len(loads) == 2


@pytest.mark.parametrize("damage", ["cut", "name", "shape", "nan"])
def test_damaged_files_are_made_again_with_a_notice(
    parts: tuple[Path, Path], tmp_path: Path, loads: list[Any], damage: str
) -> None:
    expected = open_text(parts, tmp_path)("a red fox")
    (kept,) = tmp_path.iterdir()
    if damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-100])
    else:
        wrong = {"name": expected, "shape": expected[:, 1:], "nan": expected * float("nan")}[damage]
        save_file({"other" if damage == "name" else "prompt_embeds": wrong.contiguous()}, kept)
    notices: list[str] = []
    assert torch.equal(open_text(parts, tmp_path, notices.append)("a red fox"), expected)
    assert len(notices) == 1 and "damaged" in notices[0] and len(loads) == 2
    assert torch.equal(load_file(kept)["prompt_embeds"], expected)


def test_another_encoder_or_tokenizer_does_not_meet_the_old_files(
    parts: tuple[Path, Path], tmp_path: Path, loads: list[Any]
) -> None:
    first = open_text(parts, tmp_path / "cache")("a red fox")
    tensors = torch.load(parts[0])
    tensors["norm.weight"] += 1
    torch.save(tensors, tmp_path / "t5.pth")
    second = open_text((tmp_path / "t5.pth", parts[1]), tmp_path / "cache")("a red fox")
    assert len(loads) == 2 and not torch.equal(first, second)
    shorter = CachedText(*parts, tmp_path / "cache", text_len=TEXT_LEN - 2, text_dim=TEXT_DIM)
    assert shorter("a red fox").shape == (1, TEXT_LEN - 2, TEXT_DIM) and len(loads) == 3


def test_identity_is_of_the_content_not_of_the_place(parts: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.pth"
    content = bytearray(parts[0].read_bytes())
    copy.write_bytes(content)
    assert encoder_identity(copy) == encoder_identity(parts[0])
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    assert encoder_identity(copy) != encoder_identity(parts[0])
    with pytest.raises(ValueError, match="no such file"):
        encoder_identity(tmp_path / "none.pth")


def test_one_changed_weight_is_another_encoder(tmp_path: Path) -> None:
    """Far from every sample and from the end; the checksums at the end of the file tell."""
    path = tmp_path / "t5.pth"
    found = set()
    for value in (0.0, 1.0):
        tensor = torch.zeros(2**22)
        tensor[2**20 + 5000] = value
        torch.save({"a": tensor}, path)
        found.add(encoder_identity(path))
    assert len(found) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    parts: tuple[Path, Path], tmp_path: Path, loads: list[Any]
) -> None:
    (tmp_path / "file").write_text("in the way")
    notices: list[str] = []
    text = open_text(parts, tmp_path / "file" / "cache", notices.append)
    assert text("a red fox").any() and text("a red fox").any()
    assert len(loads) == 1 and "cannot be written" in notices[0]


def embeds(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", ["tensor", "dict", "safetensors"])
def test_ready_made_embeddings(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("e.safetensors" if form == "safetensors" else "e.pt")
    for stored in (embeds(1, 12, 16), embeds(2, 12, 16), embeds(12, 16), embeds(1, 7, 16).bfloat16()):
        if form == "safetensors":
            save_file({"prompt_embeds": stored}, path)
        else:
            torch.save(stored if form == "tensor" else {"prompt_embeds": stored}, path)
        made = load_prompt_embeds(path, 12, 16)
        rows = stored if stored.dim() == 3 else stored[None]
        assert made.shape == (len(rows), 12, 16) and made.dtype == stored.dtype
        assert torch.equal(made[:, : rows.shape[1]], rows) and not made[:, rows.shape[1] :].any()


def test_embeddings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.pt"
    with pytest.raises(ValueError, match="no such file"):
        load_prompt_embeds(path, 12, 16)
    path.write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match="cannot be read"):
        load_prompt_embeds(path, 12, 16)
    for wrong in ({"embeds": embeds(1, 12, 16)}, {"prompt_embeds": [1.0]}, torch.ones(1, 12, 16).long()):
        torch.save(wrong, path)
        with pytest.raises(ValueError, match="no tensor of floats"):
            load_prompt_embeds(path, 12, 16)
    for shape in ((1, 13, 16), (1, 12, 8), (1, 0, 16), (0, 12, 16), (16,), (1, 1, 12, 16)):
        torch.save(embeds(*shape), path)
        with pytest.raises(ValueError, match="rows of up to 12 slots of 16 channels"):
            load_prompt_embeds(path, 12, 16)
    torch.save(embeds(1, 12, 16) / 0, path)
    with pytest.raises(ValueError, match="not finite"):
        load_prompt_embeds(path, 12, 16)
