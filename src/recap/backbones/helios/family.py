"""The public Helios models are backbones here: a config class each, and one way to load them.

A folder in diffusers' layout is looked for where `recap weights` puts it, or named. The text encoder is loaded and
released before the transformer is read. What does not fit the device is kept on the host and brought over group by
group, by diffusers' own offloading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from recap.backbones.helios.backbone import HeliosBackbone, check_stages
from recap.backbones.helios.checkpoint import (
    check_folder,
    empty_transformer,
    find_helios_weights,
    load_transformer,
)
from recap.backbones.helios.spec import BASE, DISTILLED, MID, VAE_STRIDE, HeliosSpec
from recap.backbones.text import open_text
from recap.backbones.wan.family import AUTOENCODER_PARAMETERS, describe_memory
from recap.backbones.wan.vae import load_wan_vae
from recap.errors import refuse, unknown_name
from recap.io.devices import free_on
from recap.io.extras import import_extra
from recap.io.files import from_home
from recap.io.report import Notice

OFFLOADS = ("auto", "none", "group")


@dataclass(frozen=True, slots=True)
class HeliosConfig:
    """Names the folder and settings of a public model; "" and 0 stand for the model's own."""

    # A folder in diffusers' layout.
    folder: str = ""
    # A file of embeddings instead of the text encoder; with guidance its second row is the negative prompt.
    prompt_embeds: str = ""
    # Read by the models with guidance.
    negative_prompt: str = ""
    height: int = 0
    width: int = 0
    # Per stage, coarsest first.
    steps: tuple[int, ...] = ()
    guidance: float = 0.0
    # Twice the steps in the first chunk; only the distilled model can.
    amplify_first: bool = True
    # Lambda per stage, coarsest first, instead of the memory's one.
    stage_reinforcement: tuple[float, ...] = ()
    # "group" keeps the transformer on the host, "none" on the device; "auto" chooses by the free memory.
    offload: str = "auto"

    row: ClassVar[HeliosSpec]

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise unknown_name("backbone.offload", self.offload, OFFLOADS)
        spec = self.spec
        side = VAE_STRIDE * spec.patch * 2 ** (len(spec.steps) - 1)
        for name, value in (("height", spec.height), ("width", spec.width)):
            if value < side or value % side:
                limit = f"{spec.name} generates at multiples of {side}"
                remedy = f"the released size is {self.row.width}x{self.row.height}"
                raise refuse(f"backbone.{name}", value, limit, remedy)
        stages = len(self.row.steps)
        if len(spec.steps) != stages or not all(isinstance(n, int) and n > 0 for n in spec.steps):
            limit = f"{spec.name} has {stages} stages of 1 step or more"
            raise refuse("backbone.steps", self.steps, limit, "leave it out for the released setting")
        check_stages(self.stage_reinforcement, len(spec.steps))

    @property
    def spec(self) -> HeliosSpec:
        row = self.row
        return replace(
            row,
            height=self.height or row.height,
            width=self.width or row.width,
            steps=self.steps or row.steps,
            guidance=self.guidance or row.guidance,
            amplify_first=self.amplify_first and row.amplify_first,
        )

    def build(
        self, *, device: str, dtype: torch.dtype, prompts: Sequence[str], notice: Notice
    ) -> HeliosBackbone:
        spec, folder = self.spec, self.check_files()
        diffusers = import_extra("diffusers", "Helios", "helios")
        parameters = sum(p.numel() for p in empty_transformer(folder / "transformer").parameters())
        plan = plan_memory(spec, parameters, dtype)
        offload = self._offloads(plan, device)
        on_host = plan["transformer"] if offload else 0
        for line in describe_memory(plan, text=not self.prompt_embeds, on_host=on_host):
            notice(line)
        encode = open_text(
            self.prompt_embeds,
            lambda: (folder / "text_encoder", folder / "tokenizer"),
            (spec.text_len, spec.text_dim),
            device=device,
            prompts=prompts,
            notice=notice,
            negative=self.negative_prompt if spec.guidance > 1 else None,
        )
        transformer = load_transformer(folder / "transformer", spec, dtype)
        if offload:
            offload_groups(transformer, torch.device(device))
        else:
            transformer.to(device)
        scheduler = diffusers.HeliosDMDScheduler if spec.distilled else diffusers.HeliosScheduler
        return HeliosBackbone(
            spec,
            transformer,
            scheduler.from_pretrained(folder / "scheduler"),
            encode,
            # fp32 whatever the transformer runs in, as its authors decode.
            load_wan_vae(folder / "vae", device, torch.float32).model,
            negative_prompt=self.negative_prompt,
            stage_reinforcement=self.stage_reinforcement,
            device=device,
        )

    def check_files(self) -> Path:
        """Return the folder, or refuse one that is not whole; a long sweep asks too, so nothing large is read."""
        text = not self.prompt_embeds
        if not self.folder:
            return find_helios_weights(self.row, text=text)
        remedy = "pass a folder in diffusers' layout, with all its parts"
        return check_folder(from_home(self.folder), "backbone.folder", remedy, text=text)

    def _offloads(self, plan: dict[str, int], device: str) -> bool:
        if self.offload == "auto":
            free = free_on(device)
            return free is not None and sum(plan.values()) > free
        return self.offload == "group"


class HeliosBaseConfig(HeliosConfig):
    """Helios-Base has 14B parameters, 50 guided steps and no cache: each reads the past (public checkpoint)."""

    row = BASE


class HeliosMidConfig(HeliosConfig):
    """Helios-Mid is Helios-Base in a pyramid of three stages (public checkpoint)."""

    row = MID


class HeliosDistilledConfig(HeliosConfig):
    """Helios-Distilled is Helios-Mid in two steps a stage, without guidance (public checkpoint)."""

    row = DISTILLED


def offload_groups(transformer: Any, device: torch.device) -> None:
    """Keep the weights on the host and bring each layer's over while the one before it computes."""
    # diffusers' hooks call it without asking whether it is there.
    import_extra("accelerate", "Helios", "helios")
    transformer.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=device.type == "cuda",
    )


def plan_memory(spec: HeliosSpec, parameters: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that are in memory at once, by part."""
    frame = 2 * spec.layers * spec.heads * spec.head_dim * dtype.itemsize
    frame *= spec.backbone_spec().frame_tokens
    return {
        "transformer": parameters * dtype.itemsize,
        "autoencoder": AUTOENCODER_PARAMETERS * torch.float32.itemsize,
        "a bank of one frame, stored and as read": 2 * frame,
        "the keys and values of a finished chunk": spec.frames_per_block * frame,
    }
