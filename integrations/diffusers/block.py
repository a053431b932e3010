"""This file is a custom block of diffusers: Helios' own blocks, with a memory of appearances in the loop over chunks.

Diffusers decodes after the last chunk. A memory needs the pictures of a chunk before the next one begins, so here
each chunk is decoded when it is finished, once, and the last block joins the pictures.
"""

from copy import deepcopy

import torch
from diffusers import AutoencoderKLWan, SequentialPipelineBlocks
from diffusers.modular_pipelines.helios import (
    HeliosAutoBlocks,
    HeliosPyramidAutoBlocks,
    HeliosPyramidDistilledAutoBlocks,
)
from diffusers.modular_pipelines.helios.decoders import HeliosDecodeStep
from diffusers.modular_pipelines.helios.denoise import HeliosChunkLoopWrapper
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam

from recap import attach
from recap.attach.helios import HeliosParts
from recap.errors import refuse, unknown_name

MODELS = {
    "distilled": HeliosPyramidDistilledAutoBlocks,
    "mid": HeliosPyramidAutoBlocks,
    "base": HeliosAutoBlocks,
}


class RememberingLoop(HeliosChunkLoopWrapper):
    """Generates chunk after chunk, and remembers each before the next begins."""

    def __init__(self, stock):
        """Take over the steps of diffusers' own loop."""
        super().__init__()
        self.sub_blocks = stock.sub_blocks
        self.model_name = stock.model_name

    @property
    def description(self):
        return "Generates chunk after chunk with a memory, and decodes each when it is finished."

    @property
    def loop_expected_components(self):
        return [ComponentSpec("vae", AutoencoderKLWan)]

    @property
    def loop_inputs(self):
        return [
            *super().loop_inputs,
            InputParam(
                "memory", default="recap", description="A name, a table of settings, or a config of recap."
            ),
            InputParam(
                "admission", default="auto", description="Which patches enter the bank: a name or a table."
            ),
            InputParam("flow", default="auto", description="The optical flow: a name."),
            InputParam(
                "stage_reinforcement", default=(), description="Lambda per stage, the coarsest first."
            ),
        ]

    @property
    def loop_intermediate_outputs(self):
        return [
            *super().loop_intermediate_outputs,
            OutputParam(
                "picture_chunks", type_hint=list, description="Pictures of each chunk, as the vae has them."
            ),
            OutputParam("memory_trace", type_hint=list, description="What the memory did, a line per chunk."),
        ]

    @torch.no_grad()
    def __call__(self, components, state):
        now = self.get_block_state(state)
        if not now.keep_first_frame:
            limit = "the first frame is what the memory reinforces"
            raise refuse("keep_first_frame", now.keep_first_frame, limit, "leave it out")
        now.latent_chunks, now.picture_chunks = [], []
        now.image_latents = getattr(now, "image_latents", None)
        parts = HeliosParts(
            components.transformer,
            components.vae,
            components.scheduler,
            components.vae_scale_factor_spatial,
            components.vae_scale_factor_temporal,
        )
        options = {"admission": now.admission, "flow": now.flow}
        with attach(parts, now.memory, **options, stage_reinforcement=now.stage_reinforcement) as attached:
            parts.check_inputs()
            for k in range(now.num_latent_chunk):
                components, now = self.loop_step(components, now, k=k)
                now.picture_chunks.append(decode_chunk(components.vae, now.latents))
        now.memory_trace = attached.trace
        self.set_block_state(state, now)
        return components, state


def decode_chunk(vae, latents):
    """Decode a chunk B C F rows columns as diffusers' last block does, to B 3 T Y X in -1..1."""
    latents = latents.to(vae.dtype)
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
    scale = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
    return vae.decode(latents / scale + mean, return_dict=False)[0]


class JoinStep(HeliosDecodeStep):
    """Joins the pictures of all chunks, which are decoded already."""

    @property
    def description(self):
        return "Joins the decoded chunks to the final video."

    @property
    def inputs(self):
        known = [asked for asked in super().inputs if asked.name == "output_type"]
        return [InputParam("picture_chunks", required=True, type_hint=list), *known]

    @torch.no_grad()
    def __call__(self, components, state):
        now = self.get_block_state(state)
        video = torch.cat(now.picture_chunks, dim=2)
        # As diffusers ends a video: after a whole latent frame, counted from a first picture that is one alone.
        whole = (
            1
            + (video.shape[2] - 1)
            // components.vae_scale_factor_temporal
            * components.vae_scale_factor_temporal
        )
        now.videos = components.video_processor.postprocess_video(
            video[:, :, :whole], output_type=now.output_type
        )
        self.set_block_state(state, now)
        return components, state


def add_memory(blocks):
    """Put the remembering loop and the joining step where diffusers has its own, in all blocks below these."""
    for name, block in blocks.sub_blocks.items():
        if isinstance(block, HeliosChunkLoopWrapper):
            blocks.sub_blocks[name] = RememberingLoop(block)
        elif isinstance(block, HeliosDecodeStep):
            blocks.sub_blocks[name] = JoinStep()
        else:
            add_memory(block)


class RecapHeliosBlocks(SequentialPipelineBlocks):
    """Generates long videos with Helios, from text, a picture or a video, with a memory of appearances."""

    model_name = None

    def __init__(self, model="distilled"):
        """Take the blocks of a model of the family: distilled, mid or base."""
        if model not in MODELS:
            raise unknown_name("model", model, MODELS)
        super().__init__()
        stock = MODELS[model]()
        self.model_name, self._workflow_map = stock.model_name, stock._workflow_map
        # A copy: diffusers' pipelines share these objects.
        self.sub_blocks = deepcopy(stock.sub_blocks)
        add_memory(self)

    @property
    def description(self):
        return "Helios with a memory of appearances: inputs `memory`, `admission`, `flow`, `stage_reinforcement`."

    @property
    def outputs(self):
        return [OutputParam.template("videos")]
