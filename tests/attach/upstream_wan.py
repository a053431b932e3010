"""What the stand-ins of all code bases share: a tiny Wan transformer, its wrapper, scheduler and autoencoder.

Written from a description of the public code bases: the names, signatures, cache layout and order of operations are
theirs, none of the code is. Where theirs is tied to a GPU (flash attention, bf16), this runs in fp32 on a CPU.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

FRAME_TOKENS = 6  # hard-coded upstream too, at 1560
CACHE_FRAMES = 21  # of a cache that is not told a window
DIM, HEADS, LAYERS, FFN, FREQ, TEXT_DIM, TEXT_LEN, CHANNELS = 32, 2, 2, 64, 16, 8, 4, 16
LATENT_SIZE = (4, 6)


def rope_params(length, dim):
    angles = torch.outer(
        torch.arange(length, dtype=torch.float64),
        1.0 / torch.pow(10000, torch.arange(0, dim, 2, dtype=torch.float64).div(dim)),
    )
    return torch.polar(torch.ones_like(angles), angles)


def sdpa(q, k, v):
    """B L H D; upstream has flash attention here."""
    return functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    ).transpose(1, 2)


def rope_at(x, grid_sizes, freqs, frames):
    """Turn x B L H D of whole frames, the f-th to time frames[f]; fp64 complex and back."""
    pairs = x.shape[3] // 2
    bands = freqs.split([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3], dim=1)
    rows = []
    for row, (f, h, w) in enumerate(grid_sizes.tolist()):
        length = f * h * w
        spun = torch.view_as_complex(x[row, :length].to(torch.float64).reshape(length, x.shape[2], -1, 2))
        turn = torch.cat(
            [
                bands[0][frames].view(f, 1, 1, -1).expand(f, h, w, -1),
                bands[1][:h].view(1, h, 1, -1).expand(f, h, w, -1),
                bands[2][:w].view(1, 1, w, -1).expand(f, h, w, -1),
            ],
            dim=-1,
        ).reshape(length, 1, -1)
        rows.append(torch.view_as_real(spun * turn).flatten(2))
    return torch.stack(rows).type_as(x)


class WanRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Projected(nn.Module):
    def __init__(self, local_attn_size=-1, sink_size=0):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.max_attention_size = (CACHE_FRAMES if local_attn_size == -1 else local_attn_size) * FRAME_TOKENS
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.norm_q, self.norm_k = WanRMSNorm(DIM), WanRMSNorm(DIM)

    def qkv(self, x):
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        return (
            self.norm_q(self.q(x)).view(shape), self.norm_k(self.k(x)).view(shape), self.v(x).view(shape)
        )  # fmt: skip


class WanCrossAttention(Projected):
    def forward(self, x, context, crossattn_cache):
        heads = (-1, self.num_heads, self.head_dim)
        if not crossattn_cache["is_init"]:
            crossattn_cache["k"] = self.norm_k(self.k(context)).unflatten(-1, heads[1:])
            crossattn_cache["v"] = self.v(context).unflatten(-1, heads[1:])
            crossattn_cache["is_init"] = True
        q = self.norm_q(self.q(x)).unflatten(-1, heads[1:])
        return self.o(sdpa(q, crossattn_cache["k"], crossattn_cache["v"]).flatten(2))


class CausalWanAttentionBlock(nn.Module):
    def __init__(self, attention, local_attn_size, sink_size):
        super().__init__()
        self.modulation = nn.Parameter(torch.zeros(1, 6, DIM))
        self.norm1 = nn.LayerNorm(DIM, 1e-6, elementwise_affine=False)
        self.self_attn = attention(local_attn_size, sink_size)
        self.norm3 = nn.LayerNorm(DIM, 1e-6)
        self.cross_attn = WanCrossAttention()
        self.norm2 = nn.LayerNorm(DIM, 1e-6, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(DIM, FFN), nn.GELU(approximate="tanh"), nn.Linear(FFN, DIM))

    def forward(
        self, x, e, seq_lens, grid_sizes, freqs, context, block_mask, kv_cache, crossattn_cache, *where
    ):
        """x B L M, e B F 6 M; `where`: what the attention's signature ends with, positionally."""
        frames = e.shape[1]
        s1, c1, g1, s2, c2, g2 = (self.modulation + e).chunk(6, dim=2)

        def by_frame(y):
            return y.unflatten(1, (frames, -1))

        hidden = (by_frame(self.norm1(x)) * (1 + c1) + s1).flatten(1, 2)
        y = self.self_attn(hidden, seq_lens, grid_sizes, freqs, block_mask, kv_cache, *where)
        y, update = y if isinstance(y, tuple) else (y, None)
        x = x + (by_frame(y) * g1).flatten(1, 2)
        x = x + self.cross_attn(self.norm3(x), context, crossattn_cache)
        y = self.ffn((by_frame(self.norm2(x)) * (1 + c2) + s2).flatten(1, 2))
        x = x + (by_frame(y) * g2).flatten(1, 2)
        return x if update is None else (x, update)


class CausalHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Parameter(torch.zeros(1, 2, DIM))
        self.norm = nn.LayerNorm(DIM, 1e-6, elementwise_affine=False)
        self.head = nn.Linear(DIM, 4 * CHANNELS)

    def forward(self, x, e):
        shift, scale = (self.modulation + e.unsqueeze(2)).chunk(2, dim=2)
        return self.head(self.norm(x).unflatten(1, (e.shape[1], -1)) * (1 + scale) + shift)


class CausalWanModel(nn.Module):
    def __init__(self, attention, local_attn_size=-1, sink_size=0):
        super().__init__()
        self.patch_embedding = nn.Conv3d(CHANNELS, DIM, (1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Sequential(
            nn.Linear(TEXT_DIM, DIM), nn.GELU(approximate="tanh"), nn.Linear(DIM, DIM)
        )
        self.time_embedding = nn.Sequential(nn.Linear(FREQ, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.blocks = nn.ModuleList(
            CausalWanAttentionBlock(attention, local_attn_size, sink_size) for _ in range(LAYERS)
        )
        self.head = CausalHead()
        d = DIM // HEADS
        self.freqs = torch.cat(
            [
                rope_params(1024, d - 4 * (d // 6)),
                rope_params(1024, 2 * (d // 6)),
                rope_params(1024, 2 * (d // 6)),
            ],
            dim=1,
        )

    def forward(self, x, t, context, kv_cache, crossattn_cache, current_start=0, cache_start=0, **switch):
        """x B C F rows columns, t B F."""
        x = self.patch_embedding(x)
        grid = torch.tensor([x.shape[2:]] * x.shape[0])
        x = x.flatten(2).transpose(1, 2)
        seq_lens = torch.tensor([x.shape[1]] * x.shape[0])
        half = FREQ // 2
        angles = t.double()[..., None] * torch.pow(10000, -torch.arange(half, dtype=torch.float64) / half)
        e = self.time_embedding(torch.cat([angles.cos(), angles.sin()], dim=-1).type_as(x))
        e0 = self.time_projection(e).unflatten(2, (6, DIM))
        context = self.text_embedding(context)
        updates = []
        for index, block in enumerate(self.blocks):
            x = block(
                x, e0, seq_lens, grid, self.freqs, context, None, kv_cache[index], crossattn_cache[index],
                current_start, cache_start, *switch.values(),
            )  # fmt: skip
            if isinstance(x, tuple):
                x, update = x
                updates.append((index, update))
        if updates:
            self._apply_cache_updates(kv_cache, updates)
        x = self.head(x, e)
        rows, columns = grid[0, 1:].tolist()
        x = x.unflatten(2, (rows, columns)).unflatten(-1, (2, 2, CHANNELS))  # B F rows columns 2 2 C
        return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

    @staticmethod
    def _apply_cache_updates(kv_cache, updates):
        """LongLive: what the layers found, written after the last of them."""
        for index, (current_end, local_end, info) in updates:
            cache = kv_cache[index]
            if info["action"] == "roll_and_insert":
                sink, gone, moved = (
                    info[name] for name in ("sink_tokens", "num_evicted_tokens", "num_rolled_tokens")
                )
                for name in ("k", "v"):
                    kept = cache[name][:, sink + gone : sink + gone + moved].clone()
                    cache[name][:, sink : sink + moved] = kept
            else:
                assert info["action"] == "direct_insert"
            to = slice(info["write_start_index"], info["write_end_index"])
            cache["k"][:, to], cache["v"][:, to] = info["new_k"], info["new_v"]
            assert info["current_end"] == current_end and info["local_end_index"] == local_end
            if not info["is_recompute"]:
                cache["global_end_index"].fill_(current_end)
                cache["local_end_index"].fill_(local_end)


class FlowMatchScheduler:
    """Times in fp64: upstream's fp32 is off by 5e-5 at t = 833.333, which bf16 hides and a comparison does not."""

    def __init__(self, shift=5.0):
        plain = 1 - torch.arange(1000, dtype=torch.float64) / 1000
        self.sigmas = shift * plain / (1 + (shift - 1) * plain)
        self.timesteps = 1000 * self.sigmas

    def sigma(self, timestep):
        nearest = (self.timesteps[None] - timestep.flatten()[:, None]).abs().argmin(dim=1)
        return self.sigmas[nearest].view(-1, 1, 1, 1)

    def add_noise(self, clean, noise, timestep):
        sigma = self.sigma(timestep)
        return ((1 - sigma) * clean + sigma * noise).type_as(noise)


class WanDiffusionWrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.scheduler = FlowMatchScheduler()
        self.seq_len = CACHE_FRAMES * FRAME_TOKENS

    def forward(
        self, noisy_image_or_video, conditional_dict, timestep, kv_cache=None, crossattn_cache=None,
        current_start=None, cache_start=None,
    ):  # fmt: skip
        return self._predict(
            noisy_image_or_video, conditional_dict, timestep, kv_cache, crossattn_cache, current_start,
            cache_start,
        )  # fmt: skip

    def _predict(
        self, noisy, conditional_dict, timestep, kv_cache, crossattn_cache, start, cache_start, **switch
    ):
        flow = self.model(
            noisy.transpose(1, 2), t=timestep, context=conditional_dict["prompt_embeds"], kv_cache=kv_cache,
            crossattn_cache=crossattn_cache, current_start=start, cache_start=cache_start, **switch,
        ).transpose(1, 2)  # fmt: skip
        sigma = self.scheduler.sigma(timestep).double().view(*timestep.shape, 1, 1, 1)
        return flow, (noisy.double() - sigma * flow.double()).type_as(noisy)


class TextEncoder:
    def __call__(self, text_prompts):
        rows = []
        for prompt in text_prompts:
            seed = torch.Generator().manual_seed(sum(prompt.encode()))
            rows.append(torch.randn(TEXT_LEN, TEXT_DIM, generator=seed, device="cpu"))
        return {"prompt_embeds": torch.stack(rows)}


class VaeModel:
    """One latent frame at a time, fading in from the one before: 1 picture for the first, 4 for each later one."""

    def __init__(self):
        waves = torch.arange(1, 4, dtype=torch.float64)[:, None] * (torch.arange(CHANNELS) + 0.5)
        self.mix = (math.sqrt(2 / CHANNELS) * torch.cos(math.pi / CHANNELS * waves)).float()
        self.last = None
        self.frames_decoded = 0

    def clear_cache(self):
        self.last = None

    def cached_decode(self, latents):
        pictures = []
        for frame in latents.unbind(1):
            colours = torch.einsum("kc,bcyx->bkyx", self.mix.to(frame), frame)
            steps = [1.0] if self.last is None else [0.25, 0.5, 0.75, 1.0]
            before = colours if self.last is None else self.last
            for step in steps:
                large = functional.interpolate(
                    torch.lerp(before, colours, step), scale_factor=8, mode="bilinear"
                )
                pictures.append(large.tanh())
            self.last = colours
            self.frames_decoded += 1
        return torch.stack(pictures, dim=1)


class WanVAEWrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = VaeModel()

    def decode_to_pixel(self, latent, use_cache=False):
        if use_cache:
            assert latent.shape[0] == 1, "one row at a time"
            return self.model.cached_decode(latent)
        self.model.clear_cache()
        video = self.model.cached_decode(latent)
        self.model.clear_cache()
        return video


class CausalInferencePipeline:
    """The loop of Self-Forcing and Infinite-Forcing; LongLive changes how the cache is made."""

    def __init__(self, generator, *, local_attn_size, context_noise=0):
        self.args = SimpleNamespace(context_noise=context_noise)
        self.generator, self.text_encoder, self.vae = generator, TextEncoder(), WanVAEWrapper()
        self.scheduler = generator.scheduler
        warped = torch.cat([self.scheduler.timesteps, self.scheduler.timesteps.new_zeros(1)])
        self.denoising_step_list = warped[1000 - torch.tensor([1000, 750, 500, 250])]
        self.num_transformer_blocks, self.frame_seq_length, self.num_frame_per_block = LAYERS, FRAME_TOKENS, 3
        self.local_attn_size = local_attn_size
        self.kv_cache1 = self.crossattn_cache = None

    def _initialize_kv_cache(self, batch_size, dtype, device):
        frames = CACHE_FRAMES if self.local_attn_size == -1 else self.local_attn_size
        shape = (batch_size, frames * FRAME_TOKENS, HEADS, DIM // HEADS)
        self.kv_cache1 = [
            {
                "k": torch.zeros(shape, dtype=dtype, device=device),
                "v": torch.zeros(shape, dtype=dtype, device=device),
                "global_end_index": torch.tensor([0]),
                "local_end_index": torch.tensor([0]),
            }
            for _ in range(self.num_transformer_blocks)
        ]

    def _initialize_crossattn_cache(self):
        self.crossattn_cache = [
            {"k": None, "v": None, "is_init": False} for _ in range(self.num_transformer_blocks)
        ]

    def _prepare_caches(self, noise):
        if self.kv_cache1 is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
            self._initialize_crossattn_cache()
        else:
            for block in range(self.num_transformer_blocks):
                self.crossattn_cache[block]["is_init"] = False
                self.kv_cache1[block]["global_end_index"] = torch.tensor([0])
                self.kv_cache1[block]["local_end_index"] = torch.tensor([0])

    def inference(self, noise, text_prompts, initial_latent=None, return_latents=False):
        conditional_dict = self.text_encoder(text_prompts=text_prompts)
        self._prepare_caches(noise)
        given = 0 if initial_latent is None else initial_latent.shape[1]
        output = noise.new_zeros(noise.shape[0], given + noise.shape[1], *noise.shape[2:])
        for start in range(0, given, 3):
            output[:, start : start + 3] = initial_latent[:, start : start + 3]
            self._clean(output, start, conditional_dict)
        for start in range(given, output.shape[1], 3):
            self._draw(output, noise[:, start - given : start - given + 3], start, conditional_dict)
        video = (self.vae.decode_to_pixel(output, use_cache=False) * 0.5 + 0.5).clamp(0, 1)
        return (video, output) if return_latents else video

    def _draw(self, output, noisy, start, conditional_dict):
        for index, current in enumerate(self.denoising_step_list):
            timestep = torch.ones(noisy.shape[:2], dtype=torch.float64) * current
            _, clean = self._generate(noisy, conditional_dict, timestep, start)
            if index < len(self.denoising_step_list) - 1:
                later = (
                    torch.ones(noisy.shape[0] * 3, dtype=torch.float64) * self.denoising_step_list[index + 1]
                )
                flat = clean.flatten(0, 1)
                noisy = self.scheduler.add_noise(flat, torch.randn_like(flat), later).unflatten(
                    0, clean.shape[:2]
                )
        output[:, start : start + 3] = clean
        self._clean(output, start, conditional_dict)

    def _clean(self, output, start, conditional_dict, frames=3, **switch):
        latents = output[:, start : start + frames]
        timestep = torch.ones(latents.shape[:2]) * self.args.context_noise
        self._generate(latents, conditional_dict, timestep, start, **switch)

    def _generate(self, latents, conditional_dict, timestep, start, **switch):
        return self.generator(
            noisy_image_or_video=latents,
            conditional_dict=conditional_dict,
            timestep=timestep,
            kv_cache=self.kv_cache1,
            crossattn_cache=self.crossattn_cache,
            current_start=start * self.frame_seq_length,
            **switch,
        )
