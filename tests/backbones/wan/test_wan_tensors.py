from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from recap.backbones.wan.tensors import extra, fill, read_tensors

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(2)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "old.pth", "w.safetensors"])
def test_every_kind_of_file_gives_its_tensors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        torch.save(TENSORS, path, _use_new_zipfile_serialization=name != "old.pth")
    assert same(read_tensors(path, "weights"), TENSORS)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    save_file({"stray": torch.ones(1)}, tmp_path / "model-9.safetensors")
    placed = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert same(read_tensors(tmp_path, "weights"), TENSORS)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors.*no such file"):
        read_tensors(tmp_path, "weights")
    for broken in ("{", "[]", "{}", '{"weight_map": []}'):
        index.write_text(broken)
        with pytest.raises(ValueError, match="which file holds which tensor"):
            read_tensors(tmp_path, "weights")


def test_a_folder_with_one_file_needs_no_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither an index"):
        read_tensors(tmp_path, "weights")
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"half": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    assert same(read_tensors(tmp_path, "weights"), TENSORS)


def test_what_is_no_table_of_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_tensors(tmp_path / "none.pth", "weights")
    for name in ("cut.pth", "cut.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 not really")
        with pytest.raises(ValueError, match="cannot be read"):
            read_tensors(tmp_path / name, "weights")
    torch.save({"state": TENSORS}, tmp_path / "nested.pth")
    with pytest.raises(ValueError, match="not a table of named tensors"):
        read_tensors(tmp_path / "nested.pth", "weights")


def test_a_file_that_carries_a_program_is_not_run(tmp_path: Path) -> None:
    class Program:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"a": Program()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(tmp_path / "evil.pth", "weights")
    assert not (tmp_path / "ran").exists()


def test_a_model_takes_exactly_its_own_tensors() -> None:
    def attempt(found: dict[str, torch.Tensor]) -> nn.Linear:
        with torch.device("meta"):
            model = nn.Linear(3, 2)
        names = {"weight": "w", "bias": "b"}
        fill(model, found, names, field="weights", path=Path("f.pth"), dtype=torch.bfloat16)
        return model

    found = {"w": torch.rand(2, 3), "b": torch.rand(2)}
    model = attempt(found)
    assert model.weight.dtype == torch.bfloat16 and torch.equal(model.weight, found["w"].bfloat16())
    with pytest.raises(ValueError, match="b is missing"):
        attempt({"w": found["w"]})
    with pytest.raises(ValueError, match="c is not part of the model"):
        attempt({**found, "c": torch.ones(1)})
    with pytest.raises(ValueError, match=r"w is \(3, 2\), not \(2, 3\)"):
        attempt({**found, "w": torch.rand(3, 2)})
    with pytest.raises(ValueError, match="; and 97 more"):
        attempt({**found, **{f"x{n:03d}": torch.ones(1) for n in range(101)}})


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"recap_none.*pip install recap-forcing\[wan\]"):
        extra("recap_none")
