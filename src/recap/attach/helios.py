"""Hooks a memory into diffusers' own Helios pipelines: the user's pipeline, unchanged, the same call.

What is hooked, and what a call of it means:
    pipeline.check_inputs    a call begins: a fresh memory
    a forward                of the transformer, by hooks of torch: the first since the last decode begins a chunk
    scheduler.step           its result is the chunk, in the bits that later chunks read
    vae.decode               once per chunk, which is finished: its pictures are scored, the clean pass runs
No generator of random numbers is used, so seeds stay comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recap.attach.attached import Attached, BuildMemory, OneThread, patch
from recap.backbones.helios.backbone import check_stages
from recap.backbones.helios.history import Slices, clean_arguments, slices
from recap.backbones.helios.processor import MemoryProcessor, Reading, check_transformer
from recap.backbones.helios.spec import PICTURES_PER_SECOND
from recap.errors import refuse
from recap.rollout import BlockRun
from recap.types import BackboneSpec, Block

PIPELINES = {
    "HeliosPipeline": "helios",
    "HeliosPyramidPipeline": "helios-pyramid",
    "HeliosParts": "helios-parts",
}
HISTORY = ("latents_history_long", "latents_history_mid", "latents_history_short")
INDICES = tuple(f"indices_{name}" for name in (*HISTORY, "hidden_states"))


def find_helios(pipeline: Any) -> str | None:
    """Return which of the Helios pipelines this is, by name, so that nothing is imported to ask."""
    names = [kind.__name__ for kind in type(pipeline).__mro__]
    return next((PIPELINES[name] for name in names if name in PIPELINES), None)


@dataclass
class HeliosParts:
    """Names the parts of Helios for a loop of one's own, which `attach` takes in the place of a pipeline.

    The loop calls `check_inputs` before a video, and `vae.decode` once per finished chunk.
    """

    transformer: Any
    vae: Any
    scheduler: Any
    vae_scale_factor_spatial: int
    vae_scale_factor_temporal: int

    def check_inputs(self) -> None:
        """Begin a video."""


@dataclass(slots=True)
class Chunk:
    """Describes the chunk in progress.

    `arguments` are history, indices and text of its forwards; `real_opening` tells whether there is an opening
    frame, and not zeros in its place.
    """

    run: BlockRun
    arguments: dict[str, Any]
    real_opening: bool


class HeliosSession:
    """Follows the calls of one attached pipeline, video after video."""

    def __init__(self, name: str, pipeline: Any, build: BuildMemory, stages: Sequence[float]) -> None:
        """Follow a pipeline; `stages` are the reinforcements of its pyramid, or none."""
        if pipeline.transformer is None or pipeline.vae is None:
            limit = "it has no transformer or no vae"
            remedy = "load all its parts before attaching"
            raise refuse("pipeline", type(pipeline).__qualname__, limit, remedy)
        check_transformer(pipeline.transformer)
        self.attached = Attached(name)
        self._reading = Reading(pipeline.transformer.rope)
        self._pipeline = pipeline
        self._build = build
        self._stages = check_stages(stages)
        self._thread = OneThread()
        # Chunks of this video.
        self._finished = 0
        # 1 where the user passed the opening, which is then no frame of the first chunk.
        self._offset = 0
        self._chunk: Chunk | None = None
        self._stepped: Tensor | None = None
        self._open: AbstractContextManager[None] | None = None
        self._settling = False

    def hook(self, undo: ExitStack) -> None:
        """Put all hooks on; `undo` takes them off again."""
        pipeline, transformer = self._pipeline, self._pipeline.transformer
        for layer, block in enumerate(transformer.blocks):
            make = partial(MemoryProcessor, layer=layer, reading=self._reading)
            patch(undo, block.attn1, "processor", make)
        patch(undo, pipeline, "check_inputs", self._hook_call)
        patch(undo, pipeline.scheduler, "step", self._hook_step)
        patch(undo, pipeline.vae, "decode", self._hook_decode)
        # Hooks of torch, not a patched `forward`: offloading exchanges that one at the end of every call.
        undo.callback(transformer.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        undo.callback(transformer.register_forward_hook(self._after, always_call=True).remove)

    def _hook_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `check_inputs` that begins a video."""

        def check_inputs(*args: Any, **kwargs: Any) -> Any:
            self._thread.begin()
            self._finished, self._chunk, self._stepped = 0, None, None
            self.attached.memory = None
            self._reading.forget()
            self.attached.videos += 1
            return original(*args, **kwargs)

        return check_inputs

    def _hook_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a scheduler's `step` whose last result is kept."""

        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._thread.is_this():
                self._stepped = result[0]
            return result

        return step

    def _hook_decode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an autoencoder's `decode` that ends the chunk in progress, if any."""

        def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._chunk is None:
                return original(z, *args, **kwargs)
            try:
                self._thread.enter()
                result = original(z, *args, **kwargs)
                self._finish(self._chunk, z, result[0])
                return result
            finally:
                self._thread.leave()

        return decode

    def _before(self, module: Any, args: tuple[Any, ...], asked: dict[str, Any]) -> None:
        """Begin a forward of the transformer, as a hook of torch."""
        if self._settling or any(asked.get(name) is None for name in HISTORY):
            return
        self._thread.enter()
        if self._chunk is None:
            self._chunk = self._begin(asked)
        assert self.attached.spec is not None
        spec, chunk = self.attached.spec, self._chunk
        hidden = asked["hidden_states"]
        side = spec.latent_size[0] // spec.grid[0]
        tokens = int(hidden.shape[2] * (hidden.shape[3] // side) * (hidden.shape[4] // side))
        # Halvings of full resolution.
        level = max(spec.latent_size[0] // hidden.shape[-2], 1).bit_length() - 1
        stage = max(int(self._pipeline.scheduler.config.stages) - 1 - level, 0)
        if self._stages and level >= len(self._stages):
            limit = f"the pipeline has a stage {level} halvings below full resolution"
            raise refuse("stage_reinforcement", self._stages, limit, "pass one value per stage")
        self._open = self._reading.denoising(
            chunk.run.context,
            self._places(asked, tokens, real=chunk.real_opening),
            spec.grid,
            stage=stage,
            reinforcement=self._stages[-1 - level] if self._stages else None,
        )
        self._open.__enter__()

    def _after(self, module: Any, args: Any, result: Any) -> None:
        """End a forward, also one that failed, as a hook of torch."""
        if not self._settling and self._thread.leave() and self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def _begin(self, asked: dict[str, Any]) -> Chunk:
        """Begin a chunk, and with the first one of a video a fresh memory."""
        opening = asked["latents_history_short"][:, :, 0]
        real = self._finished > 0 or bool(opening.any())
        if self.attached.memory is None:
            self._offset = int(real)
            sizes = self._measure(asked)
            self.attached.remember(sizes, self._build(sizes, str(asked["hidden_states"].device)))
        spec, memory = self.attached.spec, self.attached.memory
        assert spec is not None and memory is not None
        length, rows = spec.frames_per_block, opening.shape[0]
        block = Block(self._finished, self._offset + self._finished * length, length, ("",) * rows)
        kept = {name: asked[name] for name in (*HISTORY, *INDICES, "encoder_hidden_states")}
        return Chunk(BlockRun(memory, spec, block), kept, real)

    def _measure(self, asked: dict[str, Any]) -> BackboneSpec:
        """Return the sizes of the video in progress; history is at full resolution at every stage."""
        pipeline, config = self._pipeline, self._pipeline.transformer.config
        short, (_, side, _) = asked["latents_history_short"], config.patch_size
        rows, columns = short.shape[-2:]
        frames = asked["hidden_states"].shape[2]
        return BackboneSpec(
            name=self.attached.checkout,
            layers=len(pipeline.transformer.blocks),
            heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            grid=(rows // side, columns // side),
            token_pixels=side * pipeline.vae_scale_factor_spatial,
            latent_channels=short.shape[1],
            latent_size=(rows, columns),
            frames_per_block=frames,
            window_frames=sum(asked[name].shape[2] for name in HISTORY) + frames,
            pictures_per_frame=pipeline.vae_scale_factor_temporal,
            pictures_per_second=PICTURES_PER_SECOND,
            carries_history=True,
            decodes_alone=True,
        )

    def _places(self, asked: dict[str, Any], current: int, *, real: bool) -> Slices:
        """Return where each part of the sequence is, before `current` tokens of the chunk itself."""
        assert self.attached.spec is not None
        long, mid, short = (asked[name].shape[2] for name in HISTORY)
        return slices(self.attached.spec.grid, (long, mid, short - 1), current, real=real)

    @torch.no_grad()
    def _finish(self, chunk: Chunk, z: Tensor, pictures: Tensor) -> None:
        """Score a decoded chunk, read it once more, and keep what is new."""
        spec = self.attached.spec
        assert spec is not None
        self._chunk = None
        latents = self._latents(z)
        pixels = (pictures.transpose(1, 2).float() * 0.5 + 0.5).clamp(0, 1)
        wait = chunk.run.look(pixels)
        if chunk.run.clean.wants_tokens:
            self._settle(chunk, latents)
        wait()
        made = chunk.run.commit(latents, pixels)
        self._reading.forget()
        # The user's opening is a frame, but the pipeline makes no pictures of it: the first chunk's come first.
        starts = spec.first_pictures(self._finished * spec.frames_per_block, spec.frames_per_block)
        self.attached.record(replace(made, first_pictures=starts))
        self._finished += 1

    def _settle(self, chunk: Chunk, latents: Tensor) -> None:
        """Run the clean pass of a finished chunk."""
        assert self.attached.spec is not None
        opening = chunk.arguments["latents_history_short"][:, :, :1] if chunk.real_opening else None
        asked = clean_arguments(chunk.arguments, latents, opening)
        self._settling = True
        try:
            places = self._places(asked, 0, real=True)
            with self._reading.settled(chunk.run.clean, places, self.attached.spec.grid):
                self._pipeline.transformer(**asked, return_dict=False)
        finally:
            self._settling = False

    def _latents(self, z: Tensor) -> Tensor:
        """Return the chunk as the pipeline's loop keeps it, from what the autoencoder is called with."""
        config, shape = self._pipeline.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean).view(shape).to(z)
        scale = 1.0 / torch.tensor(config.latents_std).view(shape).to(z)
        stepped = self._stepped
        # A callback may have changed the chunk after the last step; else the step's own bits are exact.
        if stepped is None or stepped.shape != z.shape:
            return (z - mean) * scale
        return stepped if torch.equal(stepped.float().to(z) / scale + mean, z) else (z - mean) * scale
