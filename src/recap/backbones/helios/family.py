"""The public Helios models as backbones: a row each, one way to load them.

A folder in diffusers' layout is looked for where `recap weights` puts it, or named. The text encoder comes and goes
before the transformer is read. What does not fit the device is kept on the host and brought over group by group, by
diffusers' own offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from recap.backbones.helios.backbone import HeliosBackbone, check_stages
from recap.backbones.helios.checkpoint import empty_transformer, load_transformer
from recap.backbones.helios.published import check_folder, find_helios_weights
from recap.backbones.helios.spec import BASE, DISTILLED, MID, VAE_STRIDE, HeliosSpec
from recap.backbones.wan.cached_text import CachedText, load_prompt_embeds
from recap.backbones.wan.family import AUTOENCODER_PARAMETERS, TEXT_ENCODER_BYTES
from recap.backbones.wan.vae import load_wan_vae
from recap.errors import refuse, unknown_name
from recap.io.extras import import_extra
from recap.io.files import weights_folder
from recap.io.report import Notice

OFFLOADS = ("auto", "none", "group")


@dataclass(frozen=True, slots=True)
class HeliosConfig:
    """Where a public model lies and how it is set up; "" and 0 are the row's own."""

    folder: str = ""  # in diffusers' layout; "" is where `recap weights` puts it
    prompt_embeds: str = ""  # a file of embeddings instead of the text encoder; a second row for guidance
    negative_prompt: str = ""  # read by the rows with guidance
    height: int = 0
    width: int = 0
    steps: tuple[int, ...] = ()  # per stage, coarsest first
    guidance: float = 0.0
    amplify_first: bool = True  # twice the steps in the first chunk; only the distilled row can
    stage_reinforcement: tuple[
        float, ...
    ] = ()  # lambda per stage, coarsest first, instead of the memory's one
    offload: str = "auto"  # "group" keeps the transformer on the host, "none" on the device

    row: ClassVar[HeliosSpec]

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise unknown_name("backbone.offload", self.offload, OFFLOADS)
        spec = self.spec
        side = VAE_STRIDE * spec.patch * 2 ** (len(spec.steps) - 1)
        for name, value in (("height", spec.height), ("width", spec.width)):
            if value < side or value % side:
                limit = f"{spec.name} generates at multiples of {side}"
                raise refuse(
                    f"backbone.{name}",
                    value,
                    limit,
                    f"the released size is {self.row.width}x{self.row.height}",
                )
        if len(spec.steps) != len(self.row.steps) or not all(
            isinstance(n, int) and n > 0 for n in spec.steps
        ):
            limit = f"{spec.name} has {len(self.row.steps)} stages of 1 step or more"
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
        for line in describe_plan(plan, offload=offload, text=not self.prompt_embeds):
            notice(line)
        encode = self._text(spec, folder, device, prompts, notice)
        transformer = load_transformer(folder / "transformer", spec, dtype)
        if offload:
            offload_groups(transformer, torch.device(device))
        else:
            transformer.to(device)
        # fp32 whatever the transformer runs in, as its authors decode.
        vae = load_wan_vae(folder / "vae", device, torch.float32).model
        return HeliosBackbone(
            spec,
            transformer,
            _scheduler(diffusers, folder, distilled=spec.distilled),
            encode,
            vae,
            negative_prompt=self.negative_prompt,
            stage_reinforcement=self.stage_reinforcement,
            device=device,
        )

    def check_files(self) -> Path:
        """The folder, if it is whole; asked for before a long sweep too, so it reads nothing large."""
        text = not self.prompt_embeds
        if not self.folder:
            return find_helios_weights(self.row.name, text=text)
        remedy = "pass a folder in diffusers' layout, with all its parts"
        return check_folder(Path(self.folder).expanduser(), "backbone.folder", remedy, text=text)

    def _offloads(self, plan: dict[str, int], device: str) -> bool:
        if self.offload == "auto":
            free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else None
            return free is not None and sum(plan.values()) > free
        return self.offload == "group"

    def _text(
        self, spec: HeliosSpec, folder: Path, device: str, prompts: Sequence[str], notice: Notice
    ) -> Callable[[str], Tensor]:
        guided = spec.guidance > 1
        if self.prompt_embeds:
            embeds = load_prompt_embeds(Path(self.prompt_embeds), spec.text_len, spec.text_dim)
            if len(embeds) != 1 + guided:
                limit = f"it holds {len(embeds)} rows; every prompt gets the first" + (
                    ", the negative one the second" if guided else ""
                )
                raise refuse("backbone.prompt_embeds", self.prompt_embeds, limit, f"save {1 + guided}")
            negative = self.negative_prompt
            return lambda prompt: embeds[1:2] if guided and prompt == negative else embeds[:1]
        text = CachedText(
            folder / "text_encoder",
            folder / "tokenizer",
            weights_folder() / "text",
            text_len=spec.text_len,
            text_dim=spec.text_dim,
            device=device,
            notice=notice,
        )
        text.prepare([*prompts, *([self.negative_prompt] if guided else [])])
        return text


@dataclass(frozen=True, slots=True)
class HeliosBaseConfig(HeliosConfig):
    """Helios-Base, 14B, 50 steps with guidance: no cache, the past is read at every step (public checkpoint)."""

    row = BASE


@dataclass(frozen=True, slots=True)
class HeliosMidConfig(HeliosConfig):
    """Helios-Mid, the same in a pyramid of three stages (public checkpoint)."""

    row = MID


@dataclass(frozen=True, slots=True)
class HeliosDistilledConfig(HeliosConfig):
    """Helios-Distilled, the same in two steps a stage, without guidance (public checkpoint)."""

    row = DISTILLED


def offload_groups(transformer: Any, device: torch.device) -> None:
    """Keep the weights on the host and bring each layer's over while the one before it computes."""
    # diffusers' hooks call it without asking whether it is there.
    import_extra("accelerate", "Helios", "helios")
    stream = device.type == "cuda"
    transformer.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=stream,
    )


def plan_memory(spec: HeliosSpec, parameters: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that are in memory at once, by part; the transformer first."""
    frame = 2 * spec.layers * spec.heads * spec.head_dim * dtype.itemsize
    frame *= spec.backbone_spec().frame_tokens
    return {
        "transformer": parameters * dtype.itemsize,
        "autoencoder": AUTOENCODER_PARAMETERS * torch.float32.itemsize,
        "a bank of one frame, stored and as read": 2 * frame,
        "the keys and values of a finished chunk": spec.frames_per_block * frame,
    }


def describe_plan(plan: dict[str, int], *, offload: bool, text: bool) -> list[str]:
    """The plan in words, before anything is read."""
    lines = [f"memory: {name} {size / 1e9:.2f} GB" for name, size in plan.items()]
    on_host = plan["transformer"] if offload else 0
    where = f" on the device, {on_host / 1e9:.1f} GB on the host, layer by layer" if offload else ""
    first = f"; before that, for new prompts, the text encoder alone {TEXT_ENCODER_BYTES / 1e9:.1f} GB"
    total = (sum(plan.values()) - on_host) / 1e9
    return [*lines, f"memory: about {total:.1f} GB and activations{where}{first if text else ''}"]


def _scheduler(diffusers: Any, folder: Path, *, distilled: bool) -> Any:
    kind = diffusers.HeliosDMDScheduler if distilled else diffusers.HeliosScheduler
    return kind.from_pretrained(folder / "scheduler")
