"""Both rules of diversity: what they keep, what they need, how they refuse."""

from __future__ import annotations

import sys

import pytest
import torch

from recap.admission.diversity import DiversityConfig, DiversityKeysConfig
from recap.memory.bank import NoveltyBank
from recap.types import Block


def test_a_rare_look_stays_and_a_common_one_makes_room(spec):
    """Ten blocks of one key and, once, three tokens of another: k-means gives these a centre of their own."""
    admission = DiversityKeysConfig(num_centres=3).build(spec, None)
    common, rare = torch.randn(2, spec.heads, spec.head_dim)
    bank = NoveltyBank(6, spec.layers)
    for index in range(10):
        keys = common + 0.1 * torch.randn(spec.layers, 1, spec.block_tokens, spec.heads, spec.head_dim)
        if index == 2:
            keys[:, :, 4:7] = rare
        admission.read_keys(keys)
        bank.admit(
            admission.propose(Block(index, 3 * index, 3, ("",)), torch.zeros(1, 1)),
            keys,
            keys,
            admission.retain,
        )
    kept = bank.keys[1, 0].flatten(1)
    assert torch.isclose(kept, rare.flatten()).all(dim=1).sum() >= 2


def test_scores_are_frozen_and_say_how_far_a_token_was(spec):
    admission = DiversityKeysConfig(num_centres=4).build(spec, None)
    bank, given = NoveltyBank(9, spec.layers), {}
    for index in range(6):
        keys = torch.randn(spec.layers, 1, spec.block_tokens, spec.heads, spec.head_dim)
        admission.read_keys(keys)
        offered = admission.propose(Block(index, 3 * index, 3, ("",)), torch.zeros(1, 1))
        given |= dict(zip(map(tuple, offered.source[0].tolist()), offered.score[0].tolist(), strict=True))
        bank.admit(offered, keys, keys, admission.retain)
        for source, score in zip(
            bank.entries.source[0].tolist(), bank.entries.score[0].tolist(), strict=True
        ):
            assert given[tuple(source)] == score >= 0
    # The descriptors it keeps are those of the bank, wherever the bank put them.
    assert set(admission.state()["place"][0].tolist()) == {
        (f << 40) + (r << 20) + c for f, r, c in bank.entries.source[0].tolist()
    }


def test_one_patch_of_dino_is_one_token(spec, dino):
    """A picture with one odd token: of all descriptors, its own differs most from the plain picture's."""
    admission = DiversityConfig(model=str(dino)).build(spec, None)
    plain = torch.full((1, 5, 3, 32, 48), 0.5)
    odd = plain.clone()
    odd[:, 4, :, 16:, 32:] = torch.rand(3, 16, 16)
    block = Block(0, 0, 2, ("",))
    difference = (admission.describe(block, odd) - admission.describe(block, plain)).norm(dim=-1)[0]
    assert difference.shape == (12,) and difference.argmax() == 11
    assert difference[:6].max() < 1e-5  # the first frame is picture 0 alone


def test_absent_weights_are_refused_by_name(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in (str(tmp_path / "nothing"), "facebook/no-such-dinov2"):
        with pytest.raises(ValueError, match=r"admission\.model is .*no DINOv2 weights.*diversity-keys"):
            DiversityConfig(model=model).build(spec, None)


def test_another_kind_of_model_is_refused(spec, tmp_path):
    from transformers import ViTConfig, ViTModel

    ViTModel(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of type vit, not DINOv2"):
        DiversityConfig(model=str(tmp_path)).build(spec, None)


def test_without_transformers_it_says_so(spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="transformers is not installed"):
        DiversityConfig().build(spec, None)


def test_keys_are_never_made_up(spec):
    admission = DiversityKeysConfig().build(spec, None)
    with pytest.raises(ValueError, match="the memory passes no keys to it; choose memory `recap`"):
        admission.propose(Block(0, 0, 3, ("",)), torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda spec: DiversityConfig(num_centres=0), "num_centres is 0: must be 1 to 65536"),
        (lambda spec: DiversityConfig(batch_points=-1), "batch_points is -1"),
        (lambda spec: DiversityKeysConfig(num_steps=0), "num_steps is 0"),
        (lambda spec: DiversityKeysConfig(layer=2).build(spec, None), "layer is 2: paper has layers 0 to 1"),
    ],
)
def test_bad_settings_are_refused_with_numbers(spec, config, message):
    with pytest.raises(ValueError, match=message):
        config(spec)
