"""The Triton kernels, run by Triton's interpreter on the CPU where there is a Triton."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.vae import candidates
from recap.fast.vae import Arranged, FastVae, ResidualUnit, can_fuse
from recap.fast.vae_kernels import tile_for

SHARED_BYTES = 227 * 1024  # of a multiprocessor of Hopper


def random_vae(width: int, device: str = "cpu") -> FastVae:
    """Random weights that keep features at about unit size."""
    network = FastVae(width, 16).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        scale = tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1
        tensor.copy_(scale * noise + float(name.endswith("gamma")))
    return network.to(device)


def decoded(fused: bool, width: int, dtype: torch.dtype, video: Tensor, cut: list[int]) -> list[Tensor]:
    vae = random_vae(width, str(video.device)).arrange(dtype, fused)
    stream: Any = vae.open_decoder()
    pieces = [stream.decode(part) for part in video.split(cut, dim=1)]
    return [*pieces, *stream.state().values()]


def interpreted() -> None:
    """What the test below runs in a process of its own: Triton decides at import who runs its kernels."""
    for channels, out, frames in ((64, 96, 1), (192, 192, 2), (96, 96, 3)):
        torch.manual_seed(frames)
        plain = ResidualUnit(channels, out).requires_grad_(False)
        plain.conv2.index = 1
        fused = copy.deepcopy(plain)
        for block in (plain, fused):
            for module in (block.norm1, block.norm2):
                torch.nn.init.uniform_(module.gamma, 0.5, 1.5, torch.Generator().manual_seed(1))
            for conv in (block.conv1, block.conv2):
                torch.nn.init.normal_(conv.weight, 0, 0.02, torch.Generator().manual_seed(2))
                torch.nn.init.normal_(conv.bias, 0, 0.2, torch.Generator().manual_seed(3))
            for module in (block, block.norm1, block.norm2, block.conv1, block.conv2):
                module.arrange(fused=block is fused)
        assert fused.conv1.fused and fused.conv2.fused and not plain.conv1.fused
        compare(plain, fused, torch.randn(2, frames, 3, 4, channels), (channels, out))


def compare(plain: ResidualUnit, fused: ResidualUnit, x: Tensor, widths: tuple[int, ...]) -> None:
    pasts = [[torch.randn(2, 2, 3, 4, channels) for channels in widths]]
    pasts.append([past.clone() for past in pasts[0]])
    made = [block(x.clone(), kept) for block, kept in zip((plain, fused), pasts, strict=True)]
    for ours, theirs in zip([made[1], *pasts[1]], [made[0], *pasts[0]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_compute_what_the_plain_layers_state() -> None:
    folder = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {folder!r}); import test_vae_kernels as t; t.interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("this numpy is newer than Triton's interpreter")
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_they_come_as_close_as_the_plain_layers(dtype: torch.dtype) -> None:
    if not can_fuse(torch.device("cuda"), dtype):
        pytest.skip("this GPU has no room for the kernels")
    video = torch.randn(1, 10, 16, 6, 10, generator=torch.Generator().manual_seed(1)).cuda()
    cut = [1, 3, 3, 3]  # the beginning, the warm-up, the recording and a replay
    exact, plain, fused = (
        decoded(*way, video, cut)[: len(cut)]
        for way in ((False, 96, torch.float32), (False, 96, dtype), (True, 96, dtype))
    )
    for ours, theirs, goal in zip(fused, plain, exact, strict=True):
        assert (ours - goal).norm() < 1.2 * (theirs - goal).norm()


def test_tiles_depend_on_the_shape_alone_and_fit_the_chip() -> None:
    convs = [conv for conv in FastVae(96, 16).convs if conv.side == 3 and conv.index]
    for channels, out in {(conv.channels, len(conv.weight)) for conv in convs}:
        tile, fitting = tile_for(channels, out), candidates(channels, out)
        assert tile in fitting
        for tile in fitting:
            assert channels % tile.depth == 0
            used = 2 * tile.stages * tile.depth * (tile.rows + tile.columns + tile.more)
            assert used <= SHARED_BYTES, tile
    assert tile_for(16, 384) is None and tile_for(32, 8) is None


def test_nothing_is_fused_where_kernels_do_not_serve() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        vae = random_vae(32).arrange(dtype)
        assert not any(layer.fused for layer in vae.modules() if isinstance(layer, Arranged))
