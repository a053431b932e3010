"""LongLive 1.0: writes are deferred, the sink is protected, prompts may switch with the past recomputed."""

from __future__ import annotations

import torch
from upstream_wan import FRAME_TOKENS, CausalInferencePipeline, Projected, WanDiffusionWrapper, rope_at, sdpa


def attention(q, k, v):
    return sdpa(q, k, v)


def causal_rope_apply(x, grid_sizes, freqs, start_frame=0):
    frames = int(grid_sizes[0, 0])
    return rope_at(x, grid_sizes, freqs, torch.arange(start_frame, start_frame + frames))


class CausalWanSelfAttention(Projected):
    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0, cache_start=None,
        sink_recache_after_switch=False,
    ):  # fmt: skip
        q, k, v = self.qkv(x)
        first = current_start // FRAME_TOKENS
        q = causal_rope_apply(q, grid_sizes, freqs, first)
        k = causal_rope_apply(k, grid_sizes, freqs, first)
        keys, values, _, found = look_up(self, kv_cache, k, v, current_start, sink_recache_after_switch)
        return self.o(attention(q, keys, values).flatten(2)), found


def look_up(self, kv_cache, k, v, current_start, sink_recache_after_switch):
    """What is read (keys, values, slots by frame), on a copy of the cache, and what is to be written."""
    new, capacity, sink = k.shape[1], kv_cache["k"].shape[1], self.sink_size * FRAME_TOKENS
    current_end = current_start + new
    global_end, held = kv_cache["global_end_index"].item(), kv_cache["local_end_index"].item()
    is_recompute = current_end <= global_end and current_start > 0
    temporary = {"k": kv_cache["k"].clone(), "v": kv_cache["v"].clone()}
    info = {"action": "direct_insert"}
    end = held + current_end - global_end
    if self.local_attn_size != -1 and current_end > global_end and new + held > capacity:
        evicted = new + held - capacity
        rolled = held - evicted - sink
        for part in temporary.values():
            part[:, sink : sink + rolled] = part[:, sink + evicted : sink + evicted + rolled].clone()
        end -= evicted
        info = {
            "action": "roll_and_insert", "sink_tokens": sink, "num_rolled_tokens": rolled,
            "num_evicted_tokens": evicted,
        }  # fmt: skip
    start = end - new
    protected = is_recompute and not sink_recache_after_switch
    write_start = max(start, sink) if protected else start
    info |= {
        "local_start_index": start, "local_end_index": end, "write_start_index": write_start,
        "write_end_index": end, "new_k": k[:, write_start - start :], "new_v": v[:, write_start - start :],
        "current_end": current_end, "is_recompute": is_recompute,
    }  # fmt: skip
    temporary["k"][:, write_start:end] = info["new_k"]
    temporary["v"][:, write_start:end] = info["new_v"]
    opening = min(sink, end)
    since = max(opening, end - (self.max_attention_size - sink))
    keys, values = (torch.cat([part[:, :opening], part[:, since:end]], dim=1) for part in temporary.values())
    slots = [*range(opening // FRAME_TOKENS), *range(since // FRAME_TOKENS, end // FRAME_TOKENS)]
    return keys, values, torch.tensor(slots), (current_end, end, info)


class LongLiveWrapper(WanDiffusionWrapper):
    def forward(
        self, noisy_image_or_video, conditional_dict, timestep, kv_cache=None, crossattn_cache=None,
        current_start=None, cache_start=None, sink_recache_after_switch=False,
    ):  # fmt: skip
        return self._predict(
            noisy_image_or_video, conditional_dict, timestep, kv_cache, crossattn_cache, current_start,
            cache_start, sink_recache_after_switch=sink_recache_after_switch,
        )  # fmt: skip


class LongLivePipeline(CausalInferencePipeline):
    def _prepare_caches(self, noise):
        self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
        self._initialize_crossattn_cache()
        self._set_all_modules_max_attention_size(self.local_attn_size)

    def _set_all_modules_max_attention_size(self, frames):
        for module in self.generator.model.modules():
            if hasattr(module, "max_attention_size") and hasattr(module, "sink_size"):
                module.max_attention_size = frames * FRAME_TOKENS


class InteractiveCausalInferencePipeline(LongLivePipeline):
    def __init__(self, generator, *, local_attn_size, context_noise=0, global_sink=True):
        super().__init__(generator, local_attn_size=local_attn_size, context_noise=context_noise)
        self.global_sink = global_sink

    def inference(self, noise, text_prompts_list, switch_frame_indices, return_latents=False):
        segments = [self.text_encoder(text_prompts=prompts) for prompts in text_prompts_list]
        switches = list(switch_frame_indices)
        self._prepare_caches(noise)
        output = torch.zeros_like(noise)
        segment = 0
        for start in range(0, noise.shape[1], 3):
            if switches and start >= switches[0]:
                switches.pop(0)
                segment += 1
                self._recache_after_switch(output, start, segments[segment])
            self._draw(output, noise[:, start : start + 3], start, segments[segment])
        video = (self.vae.decode_to_pixel(output, use_cache=False) * 0.5 + 0.5).clamp(0, 1)
        return (video, output) if return_latents else video

    def _recache_after_switch(self, output, start, conditional_dict):
        if not self.global_sink:
            for cache in self.kv_cache1:
                cache["k"].zero_()
                cache["v"].zero_()
        self._reset_crossattn()
        if start == 0:
            return
        frames = min(self.local_attn_size, start)
        self._clean(
            output, start - frames, conditional_dict, frames, sink_recache_after_switch=not self.global_sink
        )
        self._reset_crossattn()

    def _reset_crossattn(self):
        for cache in self.crossattn_cache:
            cache["is_init"] = False
