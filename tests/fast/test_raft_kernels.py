"""RAFT's Triton kernels mean what the plain steps say. Run on a GPU, or by Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Where there is a GPU it is the compiled kernels that count, so `make test-gpu` runs this, too.
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []

CHECK = """
import torch
from recap.fast import raft_kernels, raft_steps
from recap.fast.raft_steps import MOVED, STATE
from recap.flow.raft import HIDDEN, MOTION

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def make(channels, pictures=2):
    shape = (pictures, channels, 5, 7)
    return torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)


def same(name, *arguments, changes=None, **options):
    found = []
    for kernels in (raft_kernels, raft_steps):
        given = [x.clone() if x is changes and x is not None else x for x in arguments]
        made = getattr(kernels, name)(*given, **options)
        found.append(made if isinstance(made, tuple) else (made,))
    for mine, meant in zip(*found, strict=True):
        assert mine.shape == meant.shape and mine.dtype == meant.dtype
        torch.testing.assert_close(mine, meant, atol=2e-5, rtol=1e-4)


for pictures in (1, 2):
    for channels in (8, 24, 32):
        x, residual = make(channels, pictures) + 3, make(channels, pictures)
        bias = torch.randn(channels, device=device)
        for relu in (True, False):
            for other in (None, residual):
                same("normalise", x, 1e-5, other, relu=relu)
                same("add_bias", x, bias, other, relu=relu)
same("pair", make(96), make(32), torch.randn(128, device=device))
hidden = make(HIDDEN)
moved = make(MOVED)
moved[:, 2:] = 0
same("join", hidden, make(MOTION - 2), torch.randn(MOTION - 2, device=device), moved)
state = make(STATE)
shares = make(3 * HIDDEN).split((2 * HIDDEN, HIDDEN), dim=1)  # rows that lie further apart
same("gate", make(2 * HIDDEN), shares[0], hidden, state, changes=state)
same("mix", hidden, 9 * make(HIDDEN), shares[1], make(HIDDEN).sigmoid())
flow = torch.randn(2, 5, 7, 2, device=device)
same("advance", flow, make(8), torch.randn(8, device=device))
# Far outside the picture, too, and where a wild flow points nowhere at all; compiled, also in half precision.
source, target = torch.randn(2, 3, 128, 17, 22, device=device).unbind()
flow = torch.rand(3, 17, 22, 2, device=device) * 60 - 30
flow[0, 0, 0], flow[1, 1, 1] = 1e9, -1e9
for dtype in (torch.float32, torch.float16) if device == "cuda" else (torch.float32,):
    volume = raft_steps.correlate(source.flatten(2).mT, raft_steps.pool_levels(target)).to(dtype)
    found, meant = raft_kernels.read(volume, flow), raft_steps.read(volume, flow)
    torch.testing.assert_close(found, meant, atol=1e-3, rtol=1e-3)
print("alike")
"""


def test_kernels_equal_their_meaning() -> None:
    """In a process of its own: whether kernels are compiled or interpreted is decided when they are imported."""
    settings = {**os.environ, "TRITON_INTERPRET": "0" if DEVICE == "cuda" else "1"}
    found = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=settings, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "alike" in found.stdout
