"""Every way to read a window, which the benchmark of attention times on a GPU, computes the same."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.attention import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is run by itself, at full size")
def test_all_ways_agree_with_float32(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention", "--frame", "6"])
    main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["errors"]) == 11 and found["ms"] == {}
    # A failed way has its message here.
    assert all(isinstance(error, float) and error < 1e-6 for error in found["errors"].values())
