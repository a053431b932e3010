"""LongLive 1.0's infinity variant: raw keys in the cache, rotated when read by the slot they are in."""

from __future__ import annotations

import torch
from upstream_ll1 import look_up
from upstream_wan import FRAME_TOKENS, Projected, rope_at, sdpa


def attention(q, k, v):
    return sdpa(q, k, v)


def block_relativistic_rope(x, grid_sizes, freqs, relative_frame_indices):
    return rope_at(x, grid_sizes, freqs, relative_frame_indices)


class CausalWanSelfAttention(Projected):
    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0, cache_start=None,
        sink_recache_after_switch=False,
    ):  # fmt: skip
        q, k, v = self.qkv(x)
        keys, values, slots, found = look_up(self, kv_cache, k, v, current_start, sink_recache_after_switch)
        own = found[2]["local_start_index"] // FRAME_TOKENS + torch.arange(int(grid_sizes[0, 0]))
        window = grid_sizes.clone()
        window[0, 0] = len(slots)  # of row 0 only, so a batch is one row
        q = block_relativistic_rope(q, grid_sizes, freqs, own)
        keys = block_relativistic_rope(keys, window, freqs, slots)
        return self.o(attention(q, keys, values).flatten(2)), found
