"""Several processes generate with Helios what one does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("diffusers")

from benchmarks.ranks import differences
from recap.fast.ranks.group import Ranks
from recap.fast.ranks.helios import TokenSplit
from tests.backbones.helios.ranked import CASES, generate_all

MODULE = "tests.backbones.helios.ranked"


def spawned(count, file, dtype):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([*command, "-m", MODULE, str(file), dtype], check=True, timeout=300)
    return load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "dtype"), [(2, "float64"), (4, "float64"), (2, "float32")])
def test_processes_generate_what_one_does(tmp_path, count, dtype):
    one = generate_all(getattr(torch, dtype))
    many = spawned(count, tmp_path / "many.safetensors", dtype)
    assert one.keys() == many.keys() and {name.partition("/")[0] for name in one} == set(CASES)
    for name, value in one.items():
        if dtype == "float64":
            assert torch.equal(value, many[name]), name
        elif name.endswith("trace"):
            traces = (json.loads(bytes(x.tolist())) for x in (value, many[name]))
            assert max(differences(*traces), default=0.0) <= 1e-6
        else:
            assert value.shape == many[name].shape and torch.allclose(value, many[name], atol=1e-6), name


@pytest.mark.parametrize(("count", "history", "chunk"), [(2, 13, 24), (3, 7, 100), (4, 40, 5), (1, 3, 3)])
def test_every_token_is_in_one_process_and_comes_back_to_its_place(count, history, chunk):
    whole = torch.arange(2 * (history + chunk) * 3).view(2, history + chunk, 3)
    splits = [TokenSplit(Ranks(rank, count), history, chunk) for rank in range(count)]
    parts = splits[0].parts(whole)
    assert [part.shape[1] for part in parts] == splits[0].sizes and min(splits[0].sizes) > 0
    assert torch.equal(splits[0].whole(parts), whole)
    for split, part in zip(splits, parts, strict=True):
        # The last of a process's tokens are those of the chunk: only these read the text.
        assert split.chunk > 0 and bool((part[0, -split.chunk :, 0] >= 3 * history).all())
