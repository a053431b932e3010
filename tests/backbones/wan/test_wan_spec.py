from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.schedule import warp
from recap.backbones.wan.spec import RELEASED, ROWS, UNTRAINED, WAN_1_3B

WIDE, SQUARE = [1536], [1536, 1536]
ATTENTION = {
    **{f"{name}.weight": SQUARE for name in "qkvo"},
    **{f"{name}.bias": WIDE for name in "qkvo"},
    "norm_q.weight": WIDE,
    "norm_k.weight": WIDE,
}
BLOCK = {
    "modulation": [1, 6, 1536],
    **{f"self_attn.{name}": shape for name, shape in ATTENTION.items()},
    **{f"cross_attn.{name}": shape for name, shape in ATTENTION.items()},
    "norm3.weight": WIDE,
    "norm3.bias": WIDE,
    "ffn.0.weight": [8960, 1536],
    "ffn.0.bias": [8960],
    "ffn.2.weight": [1536, 8960],
    "ffn.2.bias": WIDE,
}
OUTSIDE = {
    "patch_embedding.weight": [1536, 16, 1, 2, 2],
    "patch_embedding.bias": WIDE,
    "text_embedding.0.weight": [1536, 4096],
    "text_embedding.0.bias": WIDE,
    "text_embedding.2.weight": SQUARE,
    "text_embedding.2.bias": WIDE,
    "time_embedding.0.weight": [1536, 256],
    "time_embedding.0.bias": WIDE,
    "time_embedding.2.weight": SQUARE,
    "time_embedding.2.bias": WIDE,
    "time_projection.1.weight": [9216, 1536],
    "time_projection.1.bias": [9216],
    "head.modulation": [1, 2, 1536],
    "head.head.weight": [64, 1536],
    "head.head.bias": [64],
}


@pytest.fixture(scope="module")
def full_size() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return CausalWan(WAN_1_3B).state_dict()


def test_names_and_shapes_are_those_of_the_public_checkpoints(full_size: dict[str, torch.Tensor]) -> None:
    blocks = {f"blocks.{i}.{name}": shape for i in range(30) for name, shape in BLOCK.items()}
    assert {name: list(tensor.shape) for name, tensor in full_size.items()} == OUTSIDE | blocks


def test_counts_of_the_full_size_model(full_size: dict[str, torch.Tensor]) -> None:
    assert len(full_size) == 825
    assert sum(tensor.numel() for tensor in full_size.values()) == 1_418_996_800
    first = [tensor.numel() for name, tensor in full_size.items() if name.startswith("blocks.0.")]
    assert (len(first), sum(first)) == (27, 46_440_704)


def test_geometry_of_the_full_size_model() -> None:
    spec = WAN_1_3B.backbone_spec()
    assert (spec.grid, spec.frame_tokens, spec.head_dim) == ((30, 52), 1560, 128)
    assert spec.picture_size == (480, 832)
    assert [spec.num_pictures(frames) for frames in (3, 21, 240)] == [9, 81, 957]


def test_released_steps_and_blocks() -> None:
    """Shift 5 warps 1000, 750, 500, 250 to 1000, 937.5, 833.3, 625 of model time; half way is 833.3."""
    levels = {name: [1000 * s for s in warp(row.steps, row.shift)] for name, row in ROWS.items()}
    assert levels["causal-forcing"] == levels["self-forcing"] == pytest.approx([1000, 937.5, 833.333, 625])
    assert levels["causal-forcing-2step"] == pytest.approx([1000, 833.333])
    assert levels["causal-forcing-1step"] == [1000]
    by_frame = ROWS["causal-forcing-1step"].backbone_spec()
    assert by_frame.frames_per_block == ROWS["causal-forcing-2step"].frames_per_block == 1
    # One picture, then four a block.
    assert [by_frame.num_pictures(frames) for frames in (1, 2, 3)] == [1, 5, 9]


def test_rows_are_named_by_their_key_and_hold_only_what_can_run() -> None:
    assert all(row.name == key for key, row in ROWS.items())
    assert set(RELEASED) < set(ROWS)
    assert UNTRAINED.backbone_spec().picture_size == (64, 96)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dim", 100),
        ("heads", 0),
        ("freq_dim", 63),
        ("patch", (2, 2, 2)),
        ("patch", (1, 2, 4)),
        ("latent_size", (7, 12)),
        ("token_pixels", 15),
        ("out_channels", 32),
        ("steps", (750, 500)),
        ("steps", (1000, 1000)),
        ("steps", ()),
        ("steps", (1000, 500.0)),
        ("steps", (1000, "500")),
        ("frames_per_block", 0),
        ("frames_per_block", 7),
    ],
)
def test_impossible_sizes_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"WanSpec\.\w+ is "):
        replace(UNTRAINED, **{field: value})
