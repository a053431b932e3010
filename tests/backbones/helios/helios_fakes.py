"""Tiny Helios pipelines with random weights, and the noise of diffusers' loop for ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from diffusers import (
    AutoencoderKLWan,
    HeliosDMDScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
)

from recap.admission.base import ScoredAdmission
from recap.backbones.helios.backbone import HeliosBackbone
from recap.backbones.helios.spec import BASE, DISTILLED, MID

GAMMA = 0.333  # at 1/3 diffusers' own noise fails on a CPU
TINY = {"layers": 2, "heads": 2, "head_dim": 12, "text_len": 5, "text_dim": 8, "height": 64, "width": 128}
ROWS = {
    "distilled": replace(DISTILLED, **TINY),
    "amplified": replace(DISTILLED, **TINY, amplify_first=True),
    "mid": replace(MID, **TINY, steps=(3, 2, 2)),
    "base": replace(BASE, **TINY, steps=(3,)),
}
ROWS["distilled"] = replace(ROWS["distilled"], amplify_first=False)
CHUNKS = 3
FRAMES = 9


def make_transformer(row=ROWS["distilled"], seed=0, ffn_dim=32, rope_dim=(4, 4, 4)):
    torch.manual_seed(seed)
    model = HeliosTransformer3DModel(
        num_attention_heads=row.heads,
        attention_head_dim=row.head_dim,
        in_channels=row.latent_channels,
        out_channels=row.latent_channels,
        text_dim=row.text_dim,
        freq_dim=16,
        ffn_dim=ffn_dim,
        num_layers=row.layers,
        rope_dim=rope_dim,
    )
    return model.eval()


def make_vae():
    torch.manual_seed(1)
    return AutoencoderKLWan(base_dim=2, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=0).eval()


def make_scheduler(kind):
    if kind in ("distilled", "amplified"):
        return HeliosDMDScheduler(gamma=GAMMA, use_dynamic_shifting=True, time_shift_type="linear")
    if kind == "mid":
        return HeliosScheduler(gamma=GAMMA, use_dynamic_shifting=True)
    return HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True)


def make_pipeline(kind, seed=0):
    parts = {
        "tokenizer": None,
        "text_encoder": None,
        "vae": make_vae(),
        "scheduler": make_scheduler(kind),
        "transformer": make_transformer(ROWS[kind], seed),
    }
    if kind == "base":
        pipeline = HeliosPipeline(**parts)
    else:
        flags = {"is_cfg_zero_star": kind == "mid", "is_distilled": kind != "mid"}
        pipeline = HeliosPyramidPipeline(**parts, **flags)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def text_of(prompt):
    generator = torch.Generator().manual_seed(len(prompt))
    row = ROWS["distilled"]
    return torch.randn(1, row.text_len, row.text_dim, generator=generator)


PROMPT, NEGATIVE = "a fox", ""


def call(pipeline, kind, *, seed=3, chunks=CHUNKS, **more):
    """diffusers' own call; latents B F C rows columns of all chunks."""
    row = ROWS[kind]
    steps = (
        {"num_inference_steps": row.steps[0]}
        if kind == "base"
        else {
            "pyramid_num_inference_steps_list": list(row.steps),
            "is_amplify_first_chunk": kind == "amplified",
        }
    )
    pictures = 1 + (FRAMES - 1) * 4
    out = pipeline(
        prompt_embeds=text_of(PROMPT).to(pipeline.transformer.device),
        negative_prompt_embeds=text_of(NEGATIVE).to(pipeline.transformer.device),
        height=row.height,
        width=row.width,
        num_frames=pictures * chunks,
        guidance_scale=row.guidance,
        generator=torch.Generator().manual_seed(seed),
        **{"output_type": "latent", **steps, **more},
    )
    return out.frames.transpose(1, 2) if more.get("output_type", "latent") == "latent" else out.frames


@cache
def stock_latents(kind):
    """What diffusers' own pipeline generates by itself, for tests that change nothing in it."""
    return call(make_pipeline(kind), kind)


def make_backbone(kind, seed=0, **more):
    pipeline = make_pipeline(kind, seed)
    return HeliosBackbone(
        ROWS[kind],
        pipeline.transformer,
        pipeline.scheduler,
        text_of,
        pipeline.vae,
        negative_prompt=NEGATIVE,
        **more,
    )


class CheapDecoder:
    """The picture counts of a chunk without the autoencoder: 1 of its first frame, 4 of every other, none alike."""

    def decode(self, latents):
        counts = torch.tensor([1, *[4] * (latents.shape[1] - 1)])
        shown = latents[:, :, :3].sigmoid().repeat_interleave(counts, dim=1)
        fading = torch.cat([1 - torch.arange(4 - int(count), 4) / 8 for count in counts])
        large = shown.repeat_interleave(8, dim=-1).repeat_interleave(8, dim=-2)
        return large * fading.view(-1, 1, 1, 1)

    def state(self):
        return {}

    def load_state(self, state):
        pass


@dataclass(frozen=True, slots=True)
class TinyHelios:
    """A run's backbone, `helios_fakes:TinyHelios`."""

    def build(self, *, device, dtype, prompts, notice):
        backbone = make_backbone("distilled")
        backbone.decoder = CheapDecoder
        return backbone


class PipelineNoise:
    """The noise of diffusers' loop, in its order, as `Noise` hands them out."""

    def __init__(self, kind, seed=3):
        self.row, self.generator = ROWS[kind], torch.Generator().manual_seed(seed)
        self.call = 0

    def block(self):
        self.call = 0
        return self

    def __call__(self):
        row, spec = self.row, self.row.backbone_spec()
        shape = (1, row.latent_channels, FRAMES, *spec.latent_size)
        if self.call == 0:
            noise = torch.randn(shape, generator=self.generator)
        else:
            scale = 2 ** (len(row.steps) - 1 - self.call)
            rows, columns = (side // scale for side in spec.latent_size)
            cells = torch.randn(
                row.latent_channels * FRAMES * rows * columns // 4, 4, generator=self.generator
            )
            cells = cells.view(1, row.latent_channels, FRAMES, rows // 2, columns // 2, 2, 2)
            noise = torch.zeros(shape)
            noise[..., :rows, :columns] = cells.permute(0, 1, 2, 3, 5, 4, 6).reshape(
                1, row.latent_channels, FRAMES, rows, columns
            )
        self.call += 1
        return noise.transpose(1, 2)


class SeededAdmission(ScoredAdmission):
    """Scores seeded by the block: an admission without pictures."""

    def __init__(self, spec):
        super().__init__(spec.grid)
        self.spec = spec

    def score(self, block, pixels):
        assert pixels.shape[1] == self.spec.num_pictures(block.num_frames)
        generator = torch.Generator().manual_seed(block.index)
        return torch.rand(len(pixels), block.num_frames * self.spec.frame_tokens, generator=generator)
