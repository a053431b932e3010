"""A memory in diffusers' own Helios pipelines: the user's pipeline, unchanged, the same call.

What is hooked, and what a call of it means:
    pipeline.check_inputs    a call begins: a fresh memory
    a forward                of the transformer, by hooks of torch: the first since the last decode begins a chunk
    scheduler.step           its result is the chunk, in the bits that later chunks read
    vae.decode               once per chunk, which is finished: its pictures are scored, the clean pass runs
Everything is set on instances and put back; no generator of random numbers is used, so seeds stay comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recap.attach.session import Attached, BuildMemory
from recap.attach.wan import Patches, memory_builder
from recap.backbones.helios.backbone import check_stages
from recap.backbones.helios.history import Slices, clean_arguments, slices
from recap.backbones.helios.processor import MemoryProcessor, Reading, check_transformer
from recap.backbones.helios.spec import PICTURES_PER_SECOND
from recap.contracts import MemoryConfig
from recap.errors import refuse
from recap.rollout import BlockRun
from recap.types import BackboneSpec, Block

PIPELINES = {"HeliosPipeline": "helios", "HeliosPyramidPipeline": "helios-pyramid"}
HISTORY = ("latents_history_long", "latents_history_mid", "latents_history_short")
INDICES = tuple(f"indices_{name}" for name in (*HISTORY, "hidden_states"))


def find_helios(pipeline: Any) -> str | None:
    """Which of the Helios pipelines this is, by name, so that nothing is imported to ask."""
    names = [kind.__name__ for kind in type(pipeline).__mro__]
    return next((PIPELINES[name] for name in names if name in PIPELINES), None)


@contextmanager
def attached_helios(
    pipeline: Any,
    memory: str | Mapping[str, Any] | MemoryConfig,
    *,
    admission: str | Mapping[str, Any],
    flow: str,
    stage_reinforcement: Sequence[float],
) -> Iterator[Attached]:
    transformer = pipeline.transformer
    if transformer is None or pipeline.vae is None:
        limit = "it has no transformer or no vae"
        raise refuse("pipeline", type(pipeline).__qualname__, limit, "load all its parts before attaching")
    check_transformer(transformer)
    if any(isinstance(block.attn1.processor, MemoryProcessor) for block in transformer.blocks):
        limit = "a memory is attached to it already"
        raise refuse("pipeline", type(pipeline).__qualname__, limit, "leave the other `with` first")
    name = find_helios(pipeline)
    assert name is not None
    build, stages = memory_builder(memory, admission, flow), check_stages(stage_reinforcement)
    session = HeliosSession(name, pipeline, build, stages)
    patches, handles = Patches(), []
    try:
        for layer, block in enumerate(transformer.blocks):
            stock = block.attn1.processor
            patches.set(block.attn1, "processor", MemoryProcessor(stock, layer, session.reading))
        patches.set(pipeline, "check_inputs", session.wrap_call(pipeline.check_inputs))
        patches.set(pipeline.scheduler, "step", session.wrap_step(pipeline.scheduler.step))
        patches.set(pipeline.vae, "decode", session.wrap_decode(pipeline.vae.decode))
        # Hooks of torch, not a patched `forward`: offloading exchanges that one at the end of every call.
        handles.append(transformer.register_forward_pre_hook(session.before, with_kwargs=True))
        handles.append(transformer.register_forward_hook(session.after, always_call=True))
        yield session.attached
    finally:
        for handle in handles:
            handle.remove()
        patches.undo()


@dataclass(slots=True)
class Chunk:
    """The chunk in progress."""

    run: BlockRun
    asked: dict[str, Any]  # history, indices and text of its forwards
    real_opening: bool  # whether there is an opening frame, and not zeros in its place


class HeliosSession:
    def __init__(self, name: str, pipeline: Any, build: BuildMemory, stages: tuple[float, ...]) -> None:
        self.attached = Attached(name)
        self.reading = Reading(pipeline.transformer.rope)
        self._pipeline = pipeline
        self._build = build
        self._stages = stages
        self._finished = 0  # chunks of this video
        self._offset = 0  # 1 where the user passed the opening, which is then no frame of the first chunk
        self._chunk: Chunk | None = None
        self._stepped: Tensor | None = None
        self._open: AbstractContextManager[None] | None = None
        self._settling = False

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_inputs(*args: Any, **kwargs: Any) -> Any:
            self._finished, self._chunk, self._stepped = 0, None, None
            self.attached.memory = None
            self.reading.forget()
            self.attached.videos += 1
            return original(*args, **kwargs)

        return check_inputs

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._stepped = result[0]
            return result

        return step

    def wrap_decode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(z, *args, **kwargs)
            if self._chunk is not None:
                self._finish(self._chunk, z, result[0])
            return result

        return decode

    def before(self, module: Any, args: tuple[Any, ...], asked: dict[str, Any]) -> None:
        """Hook: a forward of the transformer begins."""
        if self._settling or any(asked.get(name) is None for name in HISTORY):
            return
        if self._chunk is None:
            self._chunk = self._begin(asked)
        assert self.attached.spec is not None
        spec, chunk = self.attached.spec, self._chunk
        hidden = asked["hidden_states"]
        # Halvings of full resolution.
        level = max(spec.latent_size[0] // hidden.shape[-2], 1).bit_length() - 1
        stage = max(int(self._pipeline.scheduler.config.stages) - 1 - level, 0)
        if self._stages and level >= len(self._stages):
            limit = f"the pipeline has a stage {level} halvings below full resolution"
            raise refuse("stage_reinforcement", self._stages, limit, "give one value per stage")
        self._open = self.reading.denoising(
            chunk.run.context,
            self._places(asked, _tokens(hidden, spec), real=chunk.real_opening),
            spec.grid,
            stage=stage,
            reinforcement=self._stages[-1 - level] if self._stages else None,
        )
        self._open.__enter__()

    def after(self, module: Any, args: Any, result: Any) -> None:
        """Hook: the forward is over, also by an error."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def _begin(self, asked: dict[str, Any]) -> Chunk:
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
        """The sizes of the video in progress; history is at full resolution at every stage."""
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
        assert self.attached.spec is not None
        long, mid, short = (asked[name].shape[2] for name in HISTORY)
        return slices(self.attached.spec.grid, (long, mid, short - 1), current, real=real)

    @torch.no_grad()
    def _finish(self, chunk: Chunk, z: Tensor, pictures: Tensor) -> None:
        """A chunk is decoded: score it, read it once more, keep what is new."""
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
        self.reading.forget()
        # The user's opening is a frame, but the pipeline gives no pictures of it: the first chunk's come first.
        starts = spec.first_pictures(self._finished * spec.frames_per_block, spec.frames_per_block)
        self.attached.record(replace(made, first_pictures=starts))
        self._finished += 1

    def _settle(self, chunk: Chunk, latents: Tensor) -> None:
        assert self.attached.spec is not None
        opening = chunk.asked["latents_history_short"][:, :, :1] if chunk.real_opening else None
        asked = clean_arguments(chunk.asked, latents, opening)
        self._settling = True
        try:
            places = self._places(asked, 0, real=True)
            with self.reading.settled(chunk.run.clean, places, self.attached.spec.grid):
                self._pipeline.transformer(**asked, return_dict=False)
        finally:
            self._settling = False

    def _latents(self, z: Tensor) -> Tensor:
        """The chunk as the pipeline's loop keeps it, from what the autoencoder is called with."""
        config, shape = self._pipeline.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean).view(shape).to(z)
        scale = 1.0 / torch.tensor(config.latents_std).view(shape).to(z)
        stepped = self._stepped
        # A callback may have changed the chunk after the last step; else the step's own bits are exact.
        if (
            stepped is not None
            and stepped.shape == z.shape
            and torch.equal(stepped.float().to(z) / scale + mean, z)
        ):
            return stepped
        return (z - mean) * scale


def _tokens(hidden: Tensor, spec: BackboneSpec) -> int:
    side = spec.latent_size[0] // spec.grid[0]
    return int(hidden.shape[2] * (hidden.shape[3] // side) * (hidden.shape[4] // side))
