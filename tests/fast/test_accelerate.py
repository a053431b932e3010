"""The faster parts are used where the pictures are, whatever device a run names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from recap.admission import flow_steps
from recap.config import RunConfig
from recap.fast import accelerate
from recap.fast.speed import Parts, SpeedSettings, random_flow
from recap.memory.recap import RecapMemory
from recap.registry import load_backbone
from recap.run import build_memory


@pytest.fixture
def kernels(monkeypatch):
    """Stand in for kernels that only a GPU can run, as if Triton were there."""

    def refuse(*_):
        raise AssertionError("kernels were given pictures of a CPU")

    made = SimpleNamespace(find_evidence=refuse, claim=refuse)
    monkeypatch.setattr(accelerate, "find_spec", lambda name: made)
    monkeypatch.setattr(accelerate, "import_module", lambda name: made)
    return made


def test_a_run_on_a_gpu_uses_novelty_kernels_and_pictures_of_a_cpu_do_not(kernels):
    """`build_memory` goes by the run's device, and its caller's backbone may be on another one."""
    spec = load_backbone("untrained").spec
    shots = [{"prompt": "a", "seconds": 1}]
    fields = {"shots": shots, "backbone": "untrained", "flow": "classical", "device": "cpu"}
    config = RunConfig.from_dict(fields)
    object.__setattr__(config, "device", "cuda")
    rules = []
    for eager in (False, True):
        object.__setattr__(config, "eager", eager)
        memory = build_memory(config, spec)
        assert isinstance(memory, RecapMemory)
        rules.append(memory._admission)
    fast, plain = rules
    assert fast.faster == {"cuda": kernels} and plain.faster == {}
    torch.manual_seed(0)
    height, width = (side * spec.token_pixels for side in spec.grid)
    for frames in (1, 3):
        pictures = torch.rand(1, spec.num_pictures(frames) if frames == 1 else frames * 4, 3, height, width)
        assert torch.equal(fast.notice(pictures).fired, plain.notice(pictures).fired)


def test_a_benchmark_on_a_gpu_measures_novelty_kernels(kernels):
    backbone = load_backbone("untrained")
    parts = Parts(backbone, backbone, random_flow("cpu"), {})
    for eager, used in ((False, {"cuda": kernels}), (True, {})):
        settings = SpeedSettings("untrained", "recap", "full", "cpu", "float32", 8, eager=eager)
        object.__setattr__(settings, "device", "cuda")
        _, [rule] = parts.policy_and_rule(settings)
        assert rule.faster == used


def test_the_plain_steps_are_the_meaning(kernels):
    """A faster twin has both steps under their names."""
    assert all(callable(getattr(flow_steps, name)) for name in vars(kernels))
