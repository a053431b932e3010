"""The stand-ins keep the cache as the public code bases do: which frames stand in which slots, and clean ones."""

from __future__ import annotations

import pytest
import torch
import upstream_wan as wan
from pipelines import KINDS, make, noise_of, switch
from upstream_ll1 import InteractiveCausalInferencePipeline

TABLE = {
    (6, 0): [[0, 1, 2], [*range(6)], [*range(3, 9)], [*range(6, 12)], [*range(9, 15)]],
    (6, 1): [[0, 1, 2], [*range(6)], [0, 4, 5, 6, 7, 8], [0, 7, 8, 9, 10, 11], [0, 10, 11, 12, 13, 14]],
    (12, 3): [[0, 1, 2], [*range(6)], [*range(9)], [*range(12)], [0, 1, 2, *range(6, 15)]],
    (7, 0): [[0, 1, 2], [*range(6)], [*range(2, 9)], [*range(5, 12)], [*range(8, 15)]],
    (7, 1): [[0, 1, 2], [*range(6)], [0, *range(3, 9)], [0, *range(6, 12)], [0, *range(9, 15)]],
    (7, 3): [
        [0, 1, 2],
        [*range(6)],
        [0, 1, 2, *range(5, 9)],
        [0, 1, 2, *range(8, 12)],
        [0, 1, 2, *range(11, 15)],
    ],
}


@pytest.mark.parametrize("size", TABLE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_after_each_block(kind, size):
    """Values carry their frame: noisy steps -1 - frame, the clean pass the frame itself."""
    pipeline = make(kind, window=size[0], sink=size[1])
    pipeline._initialize_kv_cache(1, torch.float32, "cpu")
    model, cache = pipeline.generator.model, pipeline.kv_cache1[0]
    attention = model.blocks[0].self_attn
    attention.v.weight.copy_(torch.eye(wan.DIM))
    attention.v.bias.zero_()
    grid = torch.tensor([[3, 2, 3]])
    for block, expected in enumerate(TABLE[size]):
        frames = torch.arange(3 * block, 3 * block + 3).repeat_interleave(6).float()
        for stamp in (-1 - frames, -1 - frames, frames):
            x = stamp[None, :, None].expand(1, -1, wan.DIM)
            found = attention(x, None, grid, model.freqs, None, cache, 18 * block, 0)
            if isinstance(found, tuple):
                model._apply_cache_updates([cache], [(0, found[1])])
        end = int(cache["local_end_index"])
        assert cache["v"][0, :end:6, 0, 0].tolist() == expected
        assert int(cache["global_end_index"]) == 18 * (block + 1)


@pytest.mark.parametrize("global_sink", [True, False])
def test_a_switch_recomputes_the_window_and_says_whose_sink_it_keeps(monkeypatch, global_sink):
    pipeline = make("longlive-1.0", pipeline=InteractiveCausalInferencePipeline, global_sink=global_sink)
    calls, slots = [], []
    forward = pipeline.generator.forward

    def watched(**given):
        frames = given["noisy_image_or_video"].shape[1]
        before = [cache["v"].clone() for cache in pipeline.kv_cache1]
        result = forward(**given)
        if frames > 3:
            calls.append((given["current_start"] // 6, frames, given["sink_recache_after_switch"]))
            slots.append(
                [torch.equal(old, new["v"]) for old, new in zip(before, pipeline.kv_cache1, strict=True)]
            )
            assert all(
                torch.equal(old[:, :18], new["v"][:, :18]) == global_sink
                for old, new in zip(before, pipeline.kv_cache1, strict=True)
            )
        return result

    monkeypatch.setattr(pipeline.generator, "forward", watched)
    switch(pipeline, blocks=7, at=[17])
    assert calls == [(6, 12, not global_sink)]
    assert slots == [[False, False]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_past_counts(kind):
    """Block 1 is another one if block 0 was; else equal latents would prove nothing."""
    pipeline = make(kind)
    generated = []
    for scale in (1.0, 0.5):
        torch.manual_seed(0)
        noise = noise_of(3)
        noise[:, :3] *= scale
        generated.append(pipeline.inference(noise, ["a red boat"], return_latents=True)[1])
    assert (generated[0][:, 3:6] - generated[1][:, 3:6]).abs().max() > 1e-3


def test_streaming_decode_equals_the_whole():
    vae, latents = wan.WanVAEWrapper(), noise_of(3)
    whole = vae.decode_to_pixel(latents)
    parts = [vae.decode_to_pixel(part, use_cache=True) for part in latents.split(3, dim=1)]
    assert torch.equal(whole, torch.cat(parts, dim=1))
    assert [part.shape[1] for part in parts] == [9, 12, 12]
