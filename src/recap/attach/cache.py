"""Keeps the upstream cache as upstream keeps it, though nothing of ours reads it.

A pipeline looks at its indices, and LongLive attends to its contents when it recomputes the past for a new prompt.
The rule, in tokens: a block not seen before is appended, and if it does not fit, the oldest tokens behind the
sink make room; a later pass over the same block overwrites it in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recap.errors import refuse

LayerCache = dict[str, Any]
"""`k`, `v`: B tokens H D; `global_end_index`, `local_end_index`: int64, 1."""


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """Says where one pass over a block goes; the same in every layer, so the device is asked once per pass.

    `write_start` is behind `local_start` where the sink is protected. `is_recompute` is LongLive's word for a pass
    that does not change the indices.
    """

    local_start: int
    local_end: int
    write_start: int
    current_end: int
    evicted: int
    sink_tokens: int
    is_recompute: bool


def plan_write(
    cache: LayerCache, start: int, new: int, *, sink_tokens: int, rolls: bool, protects_sink: bool
) -> CacheWrite:
    """Plan the write of `new` tokens, the first of which is token `start` of the video."""
    capacity, end = cache["k"].shape[1], start + new
    global_end, filled = int(cache["global_end_index"].item()), int(cache["local_end_index"].item())
    # Another thread may empty the cache between the two reads: then one of them is 0.
    if (start and not global_end) or (global_end > 0) != (filled > 0):
        limit = f"it was emptied while token {start} of the video was to be written"
        raise refuse("kv_cache", 0, limit, "generate one video at a time through a pipeline")
    evicted = max(filled + new - capacity, 0) if rolls and end > global_end else 0
    local_end = filled + end - global_end - evicted
    if local_end > capacity:
        limit = f"it holds {capacity} tokens and never lets go of any; the video has come to token {end}"
        remedy = "set the model's local_attn_size, or generate a shorter video"
        raise refuse("kv_cache", capacity, limit, remedy)
    recompute = protects_sink and end <= global_end and start > 0
    write_start = max(local_end - new, sink_tokens) if recompute else local_end - new
    return CacheWrite(local_end - new, local_end, write_start, end, evicted, sink_tokens, recompute)


def write_now(cache: LayerCache, write: CacheWrite, keys: Tensor, values: Tensor) -> None:
    """Write as Self-Forcing and Infinite-Forcing do: inside the layer."""
    kept_end = write.local_start + write.evicted
    for store, fresh in ((cache["k"], keys), (cache["v"], values)):
        if write.evicted:
            # A copy, because source and target overlap.
            kept = store[:, write.sink_tokens + write.evicted : kept_end].clone()
            store[:, write.sink_tokens : write.local_start] = kept
        store[:, write.local_start : write.local_end] = fresh
    cache["global_end_index"].fill_(write.current_end)
    cache["local_end_index"].fill_(write.local_end)


def write_later(write: CacheWrite, keys: Tensor, values: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Return what LongLive writes after the last layer, as its `_apply_cache_updates` takes it."""
    skip = write.write_start - write.local_start
    info: dict[str, Any] = {
        "action": "roll_and_insert" if write.evicted else "direct_insert",
        "local_start_index": write.local_start,
        "local_end_index": write.local_end,
        "write_start_index": write.write_start,
        "write_end_index": write.local_end,
        "new_k": keys[:, skip:],
        "new_v": values[:, skip:],
        "current_end": write.current_end,
        "is_recompute": write.is_recompute,
    }
    if write.evicted:
        info["sink_tokens"] = write.sink_tokens
        info["num_evicted_tokens"] = write.evicted
        info["num_rolled_tokens"] = write.local_start - write.sink_tokens
    return write.current_end, write.local_end, info
