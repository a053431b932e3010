"""Damaged and hostile files: a ValueError that names the file, and nothing of them is run."""

from __future__ import annotations

import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import (
    FORMATS,
    State,
    bare,
    empty_model,
    legacy,
    longlive,
    make_lora,
    make_state,
    one_safetensors,
    opened,
    same,
    save_lora,
    self_forcing,
    sharded,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recap.backbones.wan.checkpoint import load_checkpoint
from recap.errors import RecapError

STATE = make_state()
SINGLE = (self_forcing, bare, legacy, one_safetensors)


def load(path: Path, lora: Path | None = None) -> None:
    load_checkpoint(empty_model(), path, dtype=torch.float32, loras=opened(lora, 3.0) if lora else ())


def refused(path: Path, named: Path, lora: Path | None = None) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the name is checked)
        load(path, lora)
    assert type(refusal.value) is RecapError
    assert named.name in str(refusal.value), str(refusal.value)


def places(size: int) -> list[int]:
    chosen = random.Random(size).sample(range(size), 40)
    return sorted({0, 1, 2, 7, 8, 9, 64, size // 2, size - 64, size - 22, size - 2, size - 1, *chosen})


@pytest.mark.parametrize("make", SINGLE)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, make: Callable[[Path, State], Path]) -> None:
    path = make(tmp_path, STATE)
    whole = path.read_bytes()
    for size in places(len(whole)):
        path.write_bytes(whole[:size])
        refused(path, path)


def test_a_shard_or_a_lora_cut_anywhere_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path, STATE)
    shard = next(iter(tmp_path.glob("*00002.safetensors")))
    base, lora = longlive(tmp_path, STATE), save_lora(tmp_path / "lora.pt", make_lora())
    for damaged, path, change in ((shard, index, None), (lora, base, lora)):
        whole = damaged.read_bytes()
        load(path, change)
        for size in places(len(whole))[::4]:
            damaged.write_bytes(whole[:size])
            refused(path, damaged, change)
        damaged.write_bytes(whole)


@pytest.mark.parametrize("make", SINGLE)
def test_flipped_bits_never_end_in_another_error(tmp_path: Path, make: Callable[[Path, State], Path]) -> None:
    """In the values they cannot be noticed; anywhere else they are a refusal, not a crash."""
    path = make(tmp_path, STATE)
    whole = path.read_bytes()
    dice = random.Random(0)
    refusals = []
    for _ in range(120):
        damaged = bytearray(whole)
        # Where names and sizes stand: at the front, or behind the tensors in the directory of a zip.
        span = dice.choice([(0, 3000), (len(whole) - 6000, len(whole)), (0, len(whole))])
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(*span)] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            load(path)
        except ValueError as refusal:
            refusals.append(str(refusal))
    assert refusals and all(path.name in refusal for refusal in refusals)


@given(content=st.binary(max_size=200), suffix=st.sampled_from([".pt", ".pth", ".safetensors"]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_is_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(content)
    refused(path, path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_renamed_or_missing_or_misshapen_tensor_in_every_layout(tmp_path: Path, kind: str) -> None:
    name = "blocks.1.self_attn.norm_q.weight"
    for index, changes in enumerate(
        (
            {f"{name}_": STATE[name], name: None},
            {name: None},
            {name: STATE[name][:-1].clone()},
            {name: STATE[name][None].clone()},
            {name: STATE[name].to(torch.int16)},
        )
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        state = {n: t for n, t in {**STATE, **changes}.items() if t is not None}
        if kind == "diffusers_folder" and f"{name}_" in state:
            continue  # it has no such name to write
        path = FORMATS[kind](folder, state)
        with pytest.raises(ValueError, match=r"norm_q\.weight") as refusal:
            load(path)
        assert str(folder) in str(refusal.value)


class Hostile:
    """Unpickled without care, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("form", ["zip", "zip next to tensors", "legacy", "raw"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, suffix: str, form: str) -> None:
    mark, path = tmp_path / "mark", tmp_path / f"hostile{suffix}"
    if form == "raw":
        path.write_bytes(pickle.dumps({"generator_ema": Hostile(mark)}, protocol=2))
    elif form == "zip next to tensors":
        torch.save({"generator_ema": STATE, "step": Hostile(mark)}, path)
    else:
        torch.save({"generator_ema": Hostile(mark)}, path, _use_new_zipfile_serialization=form == "zip")
    refused(path, path)
    base = longlive(tmp_path, STATE)
    refused(base, path, lora=path)
    assert not mark.exists()
    if form == "raw":  # the stand-in is hostile indeed
        pickle.loads(path.read_bytes())["generator_ema"].close()
        assert mark.exists()


@pytest.mark.parametrize(
    "content", [3, [STATE], STATE["head.head.bias"], {}, {1: torch.ones(1)}, {"generator": 3}]
)
def test_pickles_of_other_things_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", tmp_path / "x.pt")


def header(content: object, tail: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + tail


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{",
        header(b"\xff\xfe"),
        header([]),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        header({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        header({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, bytes(4)),
        header({}),
    ],
)
def test_headers_at_fault_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(path, path)
    refused(tmp_path, path)


def test_a_zip_that_is_no_torch_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "words")
    refused(path, path)


def test_a_suffix_that_lies_is_refused(tmp_path: Path) -> None:
    pickled, safe = self_forcing(tmp_path, STATE), one_safetensors(tmp_path, STATE)
    for source, name in ((pickled, "x.safetensors"), (safe, "x.pt")):
        (tmp_path / name).write_bytes(source.read_bytes())
        refused(tmp_path / name, tmp_path / name)


def test_a_refusal_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = empty_model()
    load_checkpoint(model, self_forcing(tmp_path, STATE), dtype=torch.float32)
    torch.save({"generator": make_state(seed=5) | {"head.head.bias": torch.ones(3)}}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"head\.head\.bias"):
        load_checkpoint(model, tmp_path / "x.pt", dtype=torch.float32)
    assert same(model, STATE)
