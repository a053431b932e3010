"""Whatever holds here holds for blocks of three frames and of one."""

from __future__ import annotations

import pytest
import torch

from recap.backbones.wan.backbone import UntrainedConfig


@pytest.fixture(scope="session", params=[3, 1], ids=["blocks-of-3", "blocks-of-1"])
def backbone(request):
    return UntrainedConfig(frames_per_block=request.param).build(device="cpu", dtype=torch.float32)
