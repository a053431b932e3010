"""Choosing an estimator by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recap.flow import FLOWS, RAFT_SMALL, ClassicalFlow, RaftFlow, build_flow
from recap.io.files import is_offline, weights_folder


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def notices():
    return []


def test_auto_without_weights_is_classical_and_says_so_once(home, notices):
    pytest.importorskip("cv2")
    assert isinstance(build_flow("auto", notice=notices.append), ClassicalFlow)
    assert len(notices) == 1 and "recap weights raft-small" in notices[0]


@pytest.mark.parametrize("name", ["auto", "raft-small"])
def test_installed_weights_are_used_in_silence(home, notices, raft_weights, name):
    (home / RAFT_SMALL.file_name).write_bytes(raft_weights.read_bytes())
    assert isinstance(build_flow(name, notice=notices.append), RaftFlow)
    assert notices == []


def test_a_file_of_weights_may_be_named(home, notices, raft_weights):
    assert isinstance(build_flow("raft-small", weights=raft_weights, notice=notices.append), RaftFlow)


def test_classical_by_name_is_silent(home, notices):
    pytest.importorskip("cv2")
    assert isinstance(build_flow("classical", notice=notices.append), ClassicalFlow)
    assert notices == []


def test_raft_without_weights_is_refused(home, notices):
    with pytest.raises(ValueError, match=r"not in .*recap weights raft-small"):
        build_flow("raft-small", notice=notices.append)


def test_unknown_names_are_refused_with_the_nearest(home, notices):
    with pytest.raises(ValueError, match="did you mean 'raft-small'"):
        build_flow("raft_small", notice=notices.append)


def test_every_name_has_a_line():
    assert list(FLOWS) == ["auto", "raft-small", "world-flow", "classical"]
    assert all(line and "\n" not in line for line in FLOWS.values())


@pytest.mark.parametrize("name", sorted(set(FLOWS) - {"auto"}))
def test_estimators_keep_the_contract(home, notices, name, request):
    """Shapes, type, device, rows apart, both ways alike, and the pictures left as they were."""
    if name == "classical":
        pytest.importorskip("cv2")
    weights = request.getfixturevalue("raft_weights") if name == "raft-small" else None
    estimate = build_flow(name, weights=weights, notice=notices.append)
    # A drifting texture: on unrelated noise the updates amplify rounding, a thousandfold in 8 of them.
    texture = F.interpolate(torch.rand(2, 3, 16, 20), size=(64, 80), mode="bicubic").clamp(0, 1)
    pictures = torch.stack([texture[..., i : i + 48, 2 * i : 2 * i + 64] for i in range(3)], dim=1)
    before = pictures.clone()
    flow = estimate(pictures)
    assert flow.forward.shape == flow.backward.shape == (2, 2, 2, 48, 64)
    assert flow.forward.dtype == torch.float32 and flow.forward.device == pictures.device
    torch.testing.assert_close(estimate(pictures[1:]).forward, flow.forward[1:], atol=1e-3, rtol=0)
    torch.testing.assert_close(estimate.forward(pictures), flow.forward, atol=1e-3, rtol=0)
    torch.testing.assert_close(estimate(pictures.flip(1)).forward.flip(1), flow.backward, atol=1e-3, rtol=0)
    assert torch.equal(pictures, before)


def test_the_suite_neither_fetches_nor_sees_what_is_installed(installed_home):
    """Else it would depend on the machine, and be slow where `make` has put the weights."""
    assert is_offline() and RAFT_SMALL.find() is None and weights_folder() != installed_home


def test_raft_forward_is_the_forward_half(notices, random_raft):
    estimate = build_flow("raft-small", weights=random_raft / RAFT_SMALL.file_name, notice=notices.append)
    pictures = torch.rand(2, 3, 3, 40, 48)
    torch.testing.assert_close(estimate.forward(pictures), estimate(pictures).forward)
