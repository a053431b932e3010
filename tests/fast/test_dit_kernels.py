"""The Triton kernels mean what the plain functions say. Run on a GPU, or by Triton's interpreter on a CPU."""

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
from torch.nn.functional import gelu
from recap.attention.rope import rotation
from recap.backbones.wan.quantised import Float8Linear, Float8Tokens, Int8Linear
from recap.fast import dit, dit_kernels, quantised_kernels
from recap.types import frame_positions

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
rows, tokens, heads, channels = 2, 6, 3, 8
size = heads * channels
make = lambda *shape: torch.randn(*shape, device=device)
x, added = make(rows, tokens, size), make(rows, tokens, size)
gate, scale, shift = make(size), make(size), make(size)
same = lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
for more in ({}, {"added": added}, {"added": added, "gate": gate}):
    found = [kernels.norm(x, (scale, shift), 1e-6, **more) for kernels in (dit_kernels, dit)]
    for mine, meant in zip(*found):
        same(mine, meant)
same(dit_kernels.rms(x, gate, 1e-6), dit.rms(x, gate, 1e-6))

rope = rotation(frame_positions(torch.arange(1, device=device) + 3, (2, 3)), channels)
qkv, norms = make(rows, tokens, 3 * size), (make(size), make(size))
for keep in (False, True):
    results = []
    for kernels in (dit_kernels, dit):
        window = torch.zeros(2, rows, 4 + tokens, heads, channels, device=device)
        own = window[0][:, 4:], window[1][:, 4:]
        made = kernels.split_rotate(qkv, norms, rope, own, 1e-6, keep)
        results.append((window, *(made if keep else made[:1])))
    for mine, meant in zip(*results):
        same(mine, meant)

parts = ([1.6, None], [None, 0.7], [1.6, 0.3], [None, None], [1.6, None, 0.3], [None, 9, None], [1.6, 0.3, None, 0.2])
for named in parts:
    biases = [None if bias is None else bias * make(rows, heads) for bias in named]
    outputs = [make(rows, tokens, heads, channels).transpose(1, 2) for _ in biases]
    masses = [make(rows, heads, tokens) for _ in biases]
    for mine, meant in zip(dit_kernels.merge(outputs, masses, biases), dit.merge(outputs, masses, biases)):
        same(mine, meant)

positions = torch.rand(rows, tokens, 3, device=device).double() * 5
for place in (positions, positions[:1]):
    rope = rotation(place, channels)
    store = make(2, rows, tokens + 3, heads, channels)
    windows = [torch.zeros(2, rows, 2 * tokens, heads, channels, device=device) for _ in range(2)]
    for kernels, window in zip((dit_kernels, dit), windows):
        places = window[0][:, 2 : 2 + tokens], window[1][:, 2 : 2 + tokens]
        kernels.fill(store[0][:, 3:], store[1][:, 3:], rope, *places)
    same(*windows)
    # One token that stands for all, as a mean does.
    for kernels, window in zip((dit_kernels, dit), windows):
        places = window[0][:, 2 : 2 + tokens], window[1][:, 2 : 2 + tokens]
        kernels.fill(*(part[:, :1].expand(-1, tokens, -1, -1) for part in store), rope, *places)
    same(*windows)

# In 8 bits. Triton's interpreter rounds such numbers wrongly, so there they are left as they are before rounding.
compiled = device == "cuda"
if not compiled:
    quantised_kernels.E4M3 = torch.float32


def near(mine, meant):
    torch.testing.assert_close(mine.scale, meant.scale, atol=0, rtol=1e-5)
    codes, wanted = mine.values.float(), meant.values.float()
    # One step, where the last digit decides; an interpreted value is half a step from the rounded one.
    step = torch.maximum(wanted.abs() / 8, torch.full_like(wanted, 2**-9))
    assert bool(((codes - wanted).abs() <= 1.001 * step).all())
    assert not compiled or float((codes != wanted).float().mean()) < 0.03


for more in ({}, {"added": added}, {"added": added, "gate": gate}):
    found = [kernels.norm(x, (scale, shift), 1e-6, **more, float8=True) for kernels in (dit_kernels, dit)]
    same(found[0][0], found[1][0])
    near(found[0][1], found[1][1])
x[0, 0] = 0
near(dit_kernels.quantise_tokens(x), dit.quantise_tokens(x))
near(dit_kernels.quantise_tokens(3 * x, gelu=True), dit.quantise_tokens(gelu(3 * x, approximate="tanh")))
for biases in ([make(rows, heads), None], [None, make(rows, heads), None]):
    outputs = [make(rows, tokens, heads, channels).transpose(1, 2) for _ in biases]
    masses = [make(rows, heads, tokens) for _ in biases]
    found = [kernels.merge(outputs, masses, biases, float8=True) for kernels in (dit_kernels, dit)]
    near(found[0][0], found[1][0])
    same(found[0][1], found[1][1])

# Tokens fill one and a half tiles; no output reaches the bound, and a token of zeros has the biases' GELU.
dtype = torch.bfloat16 if compiled else torch.float32
linear = torch.nn.Linear(256, 384, device=device, dtype=dtype).requires_grad_(False)
coded, wide = Float8Linear.of(linear), make(1, 192, 256)
wide[0, 5] = 0
tokens = dit.quantise_tokens(wide)
meant = gelu(torch.nn.functional.linear(tokens.restore(), coded.restore(), coded.bias.float()),
    approximate="tanh")
if not compiled:
    tokens = Float8Tokens(tokens.values.float(), tokens.scale)
    coded = Float8Linear(coded.values.float(), coded.scale, coded.bias)
made = quantised_kernels.widen_at_once(tokens, coded, quantised_kernels.WIDE)
factor, least = coded.reach
torch.testing.assert_close(made.scale, tokens.scale * factor + least, atol=0, rtol=1e-5)
assert float(made.values.float().abs().max()) < 448
error = (made.restore() - meant).abs()
if compiled:
    # Sums of 8-bit products keep some 14 bits, then e4m3's half step.
    assert bool((error <= meant.abs() / 15 + made.scale * 2**-9 + 1e-3 * meant.abs().max()).all())
    two = quantised_kernels.quantise_tokens(coded(tokens), gelu=True).restore()
    assert float((two - meant).norm() / meant.norm()) < 0.04 and float(error.norm() / meant.norm()) < 0.04
else:
    assert float(error.max()) < 1e-5
whole = Int8Linear.of(linear)
assert torch.equal(quantised_kernels.restore(whole), whole.weight)
assert torch.equal(dit_kernels.linear(wide.to(dtype), whole), whole(wide.to(dtype)))
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
