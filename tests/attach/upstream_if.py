"""Infinite-Forcing's cached self-attention: raw keys are cached, the window is rotated from 0 when read."""

from __future__ import annotations

import copy  # noqa: F401  by these two names the code base is recognised
import random  # noqa: F401

import torch
from upstream_sf import store
from upstream_wan import FRAME_TOKENS, Projected, rope_at, sdpa


def attention(q, k, v):
    return sdpa(q, k, v)


def causal_rope_apply(x, grid_sizes, freqs, start_frame=0):
    frames = int(grid_sizes[0, 0])
    return rope_at(x, grid_sizes, freqs, torch.arange(start_frame, start_frame + frames))


class CausalWanSelfAttention(Projected):
    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0, cache_start=None
    ):
        q, k, v = self.qkv(x)
        end = store(self, kv_cache, k, v, current_start)
        sink = min(self.sink_size * FRAME_TOKENS, end)
        since = max(sink, end - self.max_attention_size + sink)
        k, v = (
            torch.cat([kv_cache[name][:, :sink], kv_cache[name][:, since:end]], dim=1) for name in ("k", "v")
        )
        frames = k.shape[1] // FRAME_TOKENS
        window = grid_sizes.clone()
        window[:, 0] = frames
        q = causal_rope_apply(q, grid_sizes, freqs, frames - int(grid_sizes[0, 0]))
        k = causal_rope_apply(k, window, freqs, 0)
        return self.o(attention(q, k, v).flatten(2))
