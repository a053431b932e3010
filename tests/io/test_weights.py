from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recap.backbones.tiny.autoencoder import Autoencoder
from recap.backbones.tiny.backbone import WordTable
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import UNTRAINED
from recap.io.extras import import_extra
from recap.io.weights import as_stored, fill, open_tensors, without_storage

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(2)}


def read(path: Path, field: str) -> dict[str, torch.Tensor]:
    return {name: stored.read() for name, stored in open_tensors(path, field).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "old.pth", "w.safetensors"])
def test_every_kind_of_file_gives_its_tensors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        torch.save(TENSORS, path, _use_new_zipfile_serialization=name != "old.pth")
    assert same(read(path, "weights"), TENSORS)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    save_file({"stray": torch.ones(1)}, tmp_path / "model-9.safetensors")
    placed = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert same(read(tmp_path, "weights"), TENSORS)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no such file as its shard model-1\.safetensors"):
        open_tensors(tmp_path, "weights")
    for broken in ("{", "[]", "{}", '{"weight_map": []}'):
        index.write_text(broken)
        with pytest.raises(ValueError, match=r"index\.json.*(not JSON|not an object|no weight_map)"):
            open_tensors(tmp_path, "weights")


def test_a_folder_with_one_file_needs_no_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        open_tensors(tmp_path, "weights")
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"half": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    assert same(read(tmp_path, "weights"), TENSORS)


def test_what_is_no_table_of_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        open_tensors(tmp_path / "none.pth", "weights")
    for name in ("cut.pth", "cut.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 not really")
        with pytest.raises(ValueError, match="cannot be read"):
            open_tensors(tmp_path / name, "weights")
    torch.save({"state": TENSORS}, tmp_path / "nested.pth")
    with pytest.raises(ValueError, match=r"no plain tensors \(state\)"):
        open_tensors(tmp_path / "nested.pth", "weights")


def test_a_file_that_carries_a_program_is_not_run(tmp_path: Path) -> None:
    class Program:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"a": Program()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match="cannot be read"):
        open_tensors(tmp_path / "evil.pth", "weights")
    assert not (tmp_path / "ran").exists()


def attempt(found: dict[str, torch.Tensor]) -> nn.Linear:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    path, names = Path("f.pth"), {"weight": "w", "bias": "b"}
    stored = as_stored(found, path, "weights")
    fill(model, stored, path=path, field="weights", dtype=torch.bfloat16, names=names)
    return model


def test_a_model_takes_exactly_its_own_tensors() -> None:
    found = {"w": torch.rand(2, 3), "b": torch.rand(2)}
    model = attempt(found)
    assert model.weight.dtype == torch.bfloat16 and torch.equal(model.weight, found["w"].bfloat16())
    for changed, fault in (
        ({"w": found["w"]}, "1 missing (b)"),
        ({**found, "c": torch.ones(1)}, "1 unknown (c)"),
        ({**found, "w": torch.rand(3, 2)}, "1 misshapen (w [3, 2] for [2, 3])"),
        ({**found, "w": torch.ones(2, 3, dtype=torch.int64)}, "1 not floats (w int64)"),
        ({**found, **{f"x{n:03d}": torch.ones(1) for n in range(101)}}, "101 unknown (x000, "),
        ({"w": torch.rand(3, 2), "c": torch.ones(1)}, "1 missing (b); 1 unknown (c); 1 misshapen (w"),
    ):
        with pytest.raises(ValueError, match=re.escape(fault)) as refusal:
            attempt(changed)
        assert "weights is 'f.pth'" in str(refusal.value)
        assert ("and 93 more" in str(refusal.value)) == (len(changed) > 100)


def test_whole_numbers_fill_what_counts_and_precision_may_depend_on_the_name() -> None:
    norm, state = nn.BatchNorm1d(2), nn.BatchNorm1d(2).state_dict()
    state |= {"num_batches_tracked": torch.tensor(7), "weight": torch.rand(2)}
    stored = as_stored(state, Path("f.pt"), "weights")

    def precision(name: str) -> torch.dtype:
        return torch.float64 if name == "weight" else torch.float16

    fill(norm, stored, path=Path("f.pt"), field="weights", dtype=precision)
    assert norm.num_batches_tracked == 7 and norm.num_batches_tracked.dtype == torch.int64
    assert norm.weight.dtype == torch.float64 and norm.bias.dtype == torch.float16


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_filled_model_does_not_depend_on_its_file(tmp_path: Path, name: str) -> None:
    path, state = tmp_path / name, nn.Linear(3, 2).state_dict()
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    model = nn.Linear(3, 2)
    fill(model, open_tensors(path, "weights"), path=path, field="weights", dtype=torch.float32)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert same(model.state_dict(), state)


def test_one_tensor_of_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"two\.safetensors.*twice, also as a\.weight in one\.safetensors"):
        open_tensors(tmp_path, "weights")


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"recap_none.*the tests.*pip install recap-forcing\[helios\]"):
        import_extra("recap_none", "the tests", "helios")


class DrawnValues(TorchDispatchMode):
    """Notes what draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in ("normal", "uniform", "rand")):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_model_without_storage_draws_nothing() -> None:
    """Torch imports its compiler to draw numbers that have no storage, and every run would wait for that."""
    before = torch.get_rng_state()
    with DrawnValues() as drawn, without_storage():
        parts = CausalWan(UNTRAINED), WordTable(), Autoencoder()
    assert not drawn.seen
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    with DrawnValues() as drawn:
        CausalWan(UNTRAINED)
    assert drawn.seen
