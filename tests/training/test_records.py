"""The weights of a run are joined to whole files, or packed to half the size for the next run."""

from __future__ import annotations

import torch

from training.records import eight_bits, load_weights, save_weights, ship


def test_packed_weights_read_back_to_within_their_rounding(tmp_path):
    torch.manual_seed(0)
    state = {"a.weight": torch.randn(40, 30), "conv": torch.randn(8, 4, 3, 3), "bias": torch.randn(40)}
    # A large matrix row does not affect the precision of the others.
    state["a.weight"][3] *= 100
    state["a.weight"][5] = 0
    (tmp_path / "run").mkdir()
    save_weights(tmp_path / "run" / "dit.safetensors", state)
    ship(tmp_path / "run", tmp_path / "packed", packed=True)
    read = load_weights(tmp_path / "packed" / "dit.safetensors")
    assert read.keys() == state.keys()
    torch.testing.assert_close(read["bias"], state["bias"].half().float())
    for name in ("a.weight", "conv"):
        error = (read[name] - state[name]).abs().flatten(1).amax(dim=1)
        assert (error <= state[name].abs().flatten(1).amax(dim=1) / 127 * 0.52 + 1e-3).all()
    assert eight_bits(state)["a.weight"].dtype == torch.int8
    ship(tmp_path / "packed", tmp_path / "whole")
    again = load_weights(tmp_path / "whole" / "dit.safetensors")
    torch.testing.assert_close(again["conv"], read["conv"], rtol=1e-3, atol=1e-4)
