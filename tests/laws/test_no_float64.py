"""Apple's GPUs have no fp64: nothing is computed in it on a device that is said to lack it.

The *meta* device stands in for such a GPU: it is not the CPU, and any tensor in fp64 on it is refused here, as torch
refuses it there. Everywhere else results stay as they are, in fp64.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recap.types
from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.tiny.autoencoder import Autoencoder, StreamingDecoder
from recap.backbones.wan.backbone import UntrainedConfig, WanBackbone
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED
from recap.config import MPS_NOTICE, RunConfig, check_device
from recap.contracts import Flow
from recap.plan import Shot, make_plan
from recap.registry import MEMORIES
from recap.rollout import rollout
from recap.run import build_backbone
from recap.types import frame_positions, widest


class NoFloat64(TorchDispatchMode):
    """Refuses fp64 on the meta device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            wide = isinstance(leaf, Tensor) and leaf.is_meta and leaf.dtype == torch.float64
            assert not wide, f"{function} makes fp64 on a device that has none"
        return made


class SmallShifts:
    def __call__(self, pictures):
        change = (pictures[:, 1:] - pictures[:, :-1])[:, :, :2]
        return Flow(60 * change, -40 * change)


def embedded_elsewhere():
    """The embedded model without its weights, on the meta device."""
    with torch.device("meta"):
        model, autoencoder = CausalWan(EMBEDDED), Autoencoder()
    text = torch.zeros(1, EMBEDDED.text_len, EMBEDDED.text_dim, device="meta")
    return WanBackbone(
        model, lambda prompt: text, lambda: StreamingDecoder(autoencoder.requires_grad_(False))
    )


@pytest.fixture
def meta_without_float64(monkeypatch):
    monkeypatch.setattr(recap.types, "NO_FLOAT64", {"mps", "meta"})


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("model", ["untrained", "embedded"])
def test_no_memory_needs_it(meta_without_float64, model, memory):
    if model == "untrained":
        backbone = UntrainedConfig().build(device="meta", dtype=torch.float32)
    else:
        backbone = embedded_elsewhere()
    spec = backbone.spec
    policy = MEMORIES[memory]().build(spec, lambda: FlowNoveltyConfig().build(spec, SmallShifts()))
    plan = make_plan([[Shot("a red boat", 6.0)]], spec)
    with NoFloat64():
        blocks = list(islice(rollout(backbone, policy, plan, seeds=[0]), 4))
    assert len(blocks) == 4 and blocks[-1].latents.is_meta


def test_the_net_holds():
    with NoFloat64(), pytest.raises(AssertionError, match="fp64"):
        frame_positions(torch.arange(2, device="meta"), (2, 3))


def test_other_devices_keep_fp64():
    assert widest("cpu") == widest("cuda:1") == torch.float64 and widest("mps") == torch.float32
    assert frame_positions(torch.arange(2), (2, 3)).dtype == torch.float64


def test_a_machine_without_such_a_gpu_refuses_it():
    if torch.backends.mps.is_available():
        check_device("mps", "float32")
        return
    with pytest.raises(ValueError, match=r"device is 'mps'.*(MPS|Apple).*choose cpu or auto"):
        RunConfig.from_dict({"shots": [{"prompt": "a", "seconds": 1}], "device": "mps"})


def test_a_run_there_says_what_differs(monkeypatch):
    monkeypatch.setattr("recap.config.check_device", lambda device, dtype: None)
    config = RunConfig.from_dict(
        {"shots": [{"prompt": "a", "seconds": 1}], "device": "mps", "backbone": "untrained"}
    )
    assert config.dtype == "float32"
    lines = []
    try:
        build_backbone(config, lines.append)
    except (RuntimeError, AssertionError):
        # torch has no such device here.
        assert not torch.backends.mps.is_available()
    assert lines == [MPS_NOTICE]
