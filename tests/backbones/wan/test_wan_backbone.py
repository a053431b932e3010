from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import cast

import pytest
import torch
from torch import Tensor
from wan_fakes import FakeContext, fresh, noise_of

from recap.attention.context import BlockContext
from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.backbones.wan.spec import UNTRAINED
from recap.contracts import Backbone, Decoder, MemoryPolicy
from recap.types import Segment

DIGEST = """
import hashlib, torch
from recap.backbones.wan.backbone import build_untrained
torch.rand(7)
backbone = build_untrained(seed=3)
conditioning = backbone.condition(("a red fox", "the sea at night"))
parts = [*backbone.model.state_dict().values(), *conditioning.keys, *conditioning.values]
print(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
"""


@pytest.fixture(scope="module")
def backbone() -> WanBackbone:
    return build_untrained()


def test_it_keeps_the_promises_of_a_backbone(backbone: WanBackbone) -> None:
    promised: Backbone = backbone
    stream: Decoder = promised.decoder()
    conditioning = promised.condition(("a fox", "a dog"))
    latents = promised.denoise(noise_of(0, rows=2), conditioning, fresh())
    assert latents.shape == (2, 3, 16, 8, 12) and not latents.requires_grad
    assert stream.decode(latents).shape == (2, promised.spec.num_pictures(3), 3, *promised.spec.picture_size)
    assert promised.decoder() is not stream


def test_build_and_conditioning_repeat_in_another_process() -> None:
    mine = build_untrained(seed=3)
    conditioning = mine.condition(("a red fox", "the sea at night"))
    parts = [*mine.model.state_dict().values(), *conditioning.keys, *conditioning.values]
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    other = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest


def test_building_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = build_untrained(seed=3).model.state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    other = build_untrained(seed=3).model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(
        one["head.head.weight"], build_untrained(seed=4).model.state_dict()["head.head.weight"]
    )


def test_noise_is_asked_for_once_per_step_and_five_forwards_make_a_block(backbone: WanBackbone) -> None:
    calls = 0
    next_noise = noise_of(0)

    def counted() -> Tensor:
        nonlocal calls
        calls += 1
        return next_noise()

    context, conditioning = fresh(), backbone.condition(("a fox",))
    latents = backbone.denoise(counted, conditioning, context)
    assert calls == 4 and len(context.seen) == 4 * UNTRAINED.layers
    backbone.settle(latents, conditioning, context)
    assert calls == 4 and len(context.seen) == 5 * UNTRAINED.layers


def test_denoise_is_the_documented_loop(backbone: WanBackbone) -> None:
    conditioning, next_noise = backbone.condition(("a fox",)), noise_of(5)
    noisy = next_noise()
    with torch.no_grad():
        for sigma, following in ((1.0, 0.9375), (0.9375, 5 / 6), (5 / 6, 0.625), (0.625, None)):
            clean = noisy - sigma * backbone.model(noisy, 1000 * sigma, conditioning, fresh())
            if following is not None:
                noisy = (1 - following) * clean + following * next_noise()
    torch.testing.assert_close(
        backbone.denoise(noise_of(5), conditioning, fresh()), clean, atol=1e-5, rtol=1e-5
    )


def test_settle_makes_the_keys_of_time_zero(backbone: WanBackbone) -> None:
    """A memory that kept what the last denoising step made would remember a noisy block."""
    conditioning, context = backbone.condition(("a fox",)), fresh()
    latents = backbone.denoise(noise_of(0), conditioning, context)
    last_step = context.last_pass(UNTRAINED.layers)
    backbone.settle(latents, conditioning, context)
    settled = context.last_pass(UNTRAINED.layers)
    clean, noisy = fresh(), fresh()
    with torch.no_grad():
        backbone.model(latents, 0.0, conditioning, clean)
        backbone.model(latents, 625.0, conditioning, noisy)
    for layer in range(UNTRAINED.layers):
        assert torch.equal(settled[layer][0], clean.last_pass(UNTRAINED.layers)[layer][0])
        for wrong in (last_step, noisy.last_pass(UNTRAINED.layers)):
            assert not torch.allclose(settled[layer][0], wrong[layer][0], atol=1e-2)


def test_prompt_memory_and_noise_all_matter(backbone: WanBackbone) -> None:
    fox, sea = backbone.condition(("a red fox",)), backbone.condition(("the sea at night",))
    plain = backbone.denoise(noise_of(0), fox, fresh(first=3))
    context = fresh()
    backbone.settle(plain, fox, context)
    kept = context.last_pass(UNTRAINED.layers)
    remembering = backbone.denoise(noise_of(0), fox, FakeContext(torch.arange(3.0, 6.0), kept))
    for other in (
        backbone.denoise(noise_of(0), sea, fresh(first=3)),
        remembering,
        backbone.denoise(noise_of(1), fox, fresh(first=3)),
    ):
        assert (plain - other).std() > 0.01
    assert plain.std() > 0.3


def test_rows_of_a_batch_match_the_rows_alone(backbone: WanBackbone) -> None:
    next_noise = noise_of(0, rows=2)
    noise = [next_noise() for _ in range(4)]
    both = backbone.denoise(iter(noise).__next__, backbone.condition(("a fox", "the sea")), fresh())
    for row, prompt in enumerate(("a fox", "the sea")):
        mine = iter([part[row : row + 1] for part in noise])
        alone = backbone.denoise(mine.__next__, backbone.condition((prompt,)), fresh())
        torch.testing.assert_close(both[row : row + 1], alone, atol=1e-4, rtol=1e-4)


class NoMemory:
    needs_queries = False

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return own


def test_the_house_context_reads_as_the_plain_one(backbone: WanBackbone) -> None:
    conditioning, phases = backbone.condition(("a fox",)), torch.arange(3.0, 6.0)
    house = BlockContext(cast(MemoryPolicy, NoMemory()), phases)
    latents = backbone.denoise(noise_of(0), conditioning, house)
    torch.testing.assert_close(
        latents, backbone.denoise(noise_of(0), conditioning, FakeContext(phases)), atol=1e-4, rtol=1e-4
    )


def test_a_long_rollout_stays_finite_and_alive(backbone: WanBackbone) -> None:
    """100 blocks, each attending to the clean pass of the one before."""
    conditioning, noise = backbone.condition(("a red fox",)), noise_of(0)
    kept = None
    for _ in range(100):
        context = FakeContext(torch.arange(3.0, 6.0), kept)
        latents = backbone.denoise(noise, conditioning, context)
        backbone.settle(latents, conditioning, context)
        kept = {
            layer: (keys, values, at - torch.tensor([3.0, 0.0, 0.0]))
            for layer, (keys, values, at) in context.last_pass(UNTRAINED.layers).items()
        }
        assert latents.isfinite().all() and 0.3 < latents.std() < 3


def test_what_a_memory_keeps_may_be_changed_in_place(backbone: WanBackbone) -> None:
    conditioning, context = backbone.condition(("a fox",)), fresh()
    backbone.settle(noise_of(0)(), conditioning, context)
    keys, _, _ = context.last_pass(UNTRAINED.layers)[0]
    keys[:, 0] = 0
    assert not keys.is_inference() and not keys.requires_grad


def test_half_precision_generates_in_half_precision() -> None:
    backbone = build_untrained(dtype=torch.bfloat16)
    latents = backbone.denoise(noise_of(0), backbone.condition(("a fox",)), fresh())
    assert latents.dtype == torch.bfloat16 and latents.isfinite().all()


def test_no_prompts_are_refused(backbone: WanBackbone) -> None:
    with pytest.raises(ValueError, match="prompts is"):
        backbone.condition(())
