"""The probe as the package carries it: saved, loaded, refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recap.backbones.tiny.vocabulary import ACTORS
from recap.eval.judges.probe import SHIPPED, Probe, load_probe, save_probe
from recap.eval.judges.subject import ProbeWitness
from recap.eval.sampling import as_tensor


def test_a_saved_probe_comes_back(tmp_path):
    probe, pictures = Probe(), torch.rand(1, 3, 3, 32, 48)
    assert 0.5e6 < sum(weight.numel() for weight in probe.parameters()) < 1e6
    save_probe(probe, tmp_path / "probe.safetensors")
    again = load_probe(tmp_path / "probe.safetensors")
    before, after = probe.judge(pictures), again.judge(pictures)
    assert before.cells.shape == (1, 3, 2, 3) and before.colours.shape == (1, 3, 2, 3, 3)
    torch.testing.assert_close(before.presence, after.presence, atol=1e-2, rtol=0)
    torch.testing.assert_close(before.colours, after.colours, atol=1e-2, rtol=0)


def test_what_is_no_probe_of_this_vocabulary_is_refused(tmp_path):
    file = tmp_path / "probe.safetensors"
    with pytest.raises(ValueError, match=r"no such file.*training\.probe"):
        load_probe(file)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        load_probe(file)
    save_probe(Probe(), file)
    weights = load_file(file)
    save_file(weights, file, metadata={"actors": ",".join(reversed(ACTORS))})
    with pytest.raises(ValueError, match="other actors"):
        load_probe(file)
    save_file(weights, file)  # says nothing of its actors
    with pytest.raises(ValueError, match="other actors"):
        load_probe(file)
    save_file({name: value for name, value in weights.items() if name != "cells.bias"}, file)
    with pytest.raises(ValueError, match=r"1 missing \(cells\.bias\)"):
        load_probe(file)


def test_pictures_come_in_whole_cells():
    with pytest.raises(ValueError, match="multiples of 16"):
        Probe()(torch.zeros(1, 3, 100, 208))


def test_the_shipped_probe_loads_and_is_small():
    probe = load_probe()
    assert SHIPPED.stat().st_size < 1.2e6
    assert probe.judge(torch.rand(1, 2, 3, 128, 208)).presence.isfinite().all()


def test_a_witness_judges_a_picture_once_whoever_is_next_to_it():
    class Counting(Probe):
        judged = 0

        def forward(self, pictures):
            self.judged += len(pictures)
            return super().forward(pictures)

    probe = Counting().eval()
    witness = ProbeWitness(probe)
    pictures = np.random.default_rng(0).integers(0, 256, (40, 32, 48, 3), np.uint8)
    asked = []
    for wanted in ([3, 1, 1, 7], [7, 3, 30], range(40)):
        some = pictures[list(wanted)]
        before = probe.judged
        remembered = witness.judge(some)
        asked.append(probe.judged - before)
        for one, fresh in zip(remembered, ProbeWitness(probe).judge(some), strict=True):
            assert torch.equal(one, fresh)
        torch.testing.assert_close(remembered.shares, probe.judge(as_tensor(some)).shares)
    assert asked == [8, 8, 40]
