"""Self-Forcing's cached self-attention: keys rotated before they are cached, at absolute time."""

from __future__ import annotations

import torch
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
        first = current_start // FRAME_TOKENS
        q = causal_rope_apply(q, grid_sizes, freqs, first)
        k = causal_rope_apply(k, grid_sizes, freqs, first)
        if kv_cache is None:
            return self.o(attention(q, k, v).flatten(2))
        end = store(self, kv_cache, k, v, current_start)
        seen = slice(max(0, end - self.max_attention_size), end)
        return self.o(attention(q, kv_cache["k"][:, seen], kv_cache["v"][:, seen]).flatten(2))


def store(self, kv_cache, k, v, current_start):
    """Write a pass over a block, rolling the cache where it is full; returns where the block ends in it."""
    new, capacity, sink = k.shape[1], kv_cache["k"].shape[1], self.sink_size * FRAME_TOKENS
    current_end = current_start + new
    global_end, local_end = kv_cache["global_end_index"].item(), kv_cache["local_end_index"].item()
    if self.local_attn_size != -1 and current_end > global_end and new + local_end > capacity:
        evicted = new + local_end - capacity
        for part in (kv_cache["k"], kv_cache["v"]):
            rolled = part[:, sink + evicted : local_end].clone()
            part[:, sink : sink + rolled.shape[1]] = rolled
        end = local_end + current_end - global_end - evicted
    else:
        end = local_end + current_end - global_end
    kv_cache["k"][:, end - new : end] = k
    kv_cache["v"][:, end - new : end] = v
    kv_cache["global_end_index"].fill_(current_end)
    kv_cache["local_end_index"].fill_(end)
    return end
