"""The public causal Wan models are backbones here: a config class each, and one way to load them.

Every part may be named by path; the others are looked for where `recap weights` puts them. For the prompts that are
known at the start, the text encoder is loaded and released before the transformer is read. For one that comes later,
as in a studio, it runs on the CPU: it is never next to the transformer on a card, unless `text_device` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from recap.backbones.text import open_text
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.checkpoint import load_checkpoint, shapes_of
from recap.backbones.wan.lora import LoraChoice, open_lora, read_choice
from recap.backbones.wan.lora_alpha import REMEDY as LORA_REMEDY
from recap.backbones.wan.model import empty_model
from recap.backbones.wan.published import SETS, TEXT_ENCODER, find_tiny_decoder, find_weights
from recap.backbones.wan.spec import RELEASED, ROWS, WanSpec
from recap.backbones.wan.taehv import load_taehv
from recap.backbones.wan.vae import load_wan_vae
from recap.errors import refuse, unknown_name
from recap.io.files import from_home
from recap.io.report import Notice
from recap.io.weights import files_of

DECODERS = ("full", "tiny")
AUTOENCODER_PARAMETERS = 126_892_531


@dataclass(frozen=True, slots=True)
class WanConfig:
    """Names the files and settings of a public model; "" stands for the file that `recap weights` installed."""

    checkpoint: str = ""
    # The LoRA that belongs to the model (LongLive's), and its alpha, or 0 where its files state it.
    lora: str = ""
    lora_alpha: float = 0.0
    # LoRAs on top of it, FILE or FILE:strength each, merged in this order.
    loras: tuple[str, ...] = ()
    text_encoder: str = ""
    tokenizer: str = ""
    autoencoder: str = ""
    # "full", or "tiny": a small public one, twenty times faster.
    decoder: str = "full"
    tiny_decoder: str = ""
    # A file of embeddings that replaces the text encoder, for every prompt.
    prompt_embeds: str = ""
    # Where the text encoder runs; "" stands for the model's device where it fits, else the CPU, and for the CPU once
    # the transformer is loaded.
    text_device: str = ""
    # The window and phases of the public code instead of the paper's shared setting.
    as_released: bool = False
    # Points of the schedule at which the sampler runs the model, from 1000 down; () stands for the model's own.
    steps: tuple[int, ...] = ()

    row: ClassVar[WanSpec]

    def __post_init__(self) -> None:
        if self.decoder not in DECODERS:
            raise unknown_name("backbone.decoder", self.decoder, DECODERS)
        for text in self.loras:
            if not isinstance(text, str):
                raise refuse("backbone.loras", text, "must be text", "write FILE or FILE:strength")
            read_choice(text, "backbone.loras")
        # Its own checks are made here, before anything is loaded.
        _ = self.spec

    @property
    def spec(self) -> WanSpec:
        row = replace(self.row, steps=self.steps) if self.steps else self.row
        if not self.as_released:
            return row
        released = RELEASED[row.name]
        return replace(row, window_frames=released.window_frames, phases=released.phases)

    def build(
        self, *, device: str, dtype: torch.dtype, prompts: Sequence[str], notice: Notice
    ) -> WanBackbone:
        spec, size = self.spec, (self.spec.text_len, self.spec.text_dim)
        self.check_files()
        checkpoint, ema, own = self._weights()
        loras = [open_lora(choice, shapes_of(spec)) for choice in (*own, *self._added())]
        for lora in loras:
            notice(str(lora))
        encode = open_text(
            self.prompt_embeds,
            self._find_encoder,
            size,
            device=self.text_device or device,
            later=self.text_device or "cpu",
            prompts=prompts,
            notice=notice,
        )
        model = empty_model(spec)
        load_checkpoint(model, checkpoint, dtype=dtype, device=device, ema=ema, loras=loras)
        # Only what is used is read: with the tiny decoder the full one is needed only to encode pictures.
        full = cache(lambda: load_wan_vae(self._find_autoencoder(), device, dtype))
        decodes = full() if self.decoder == "full" else load_taehv(self._find_tiny_decoder(), device, dtype)
        return WanBackbone(
            model, encode, decodes.open_decoder, lambda pixels: full().encode(pixels), autoencoder=decodes
        )

    def check_files(self) -> None:
        """Refuse, before a long sweep begins, if a part that no path names is not installed; reads no file."""
        text = self.prompt_embeds or (self.text_encoder and self.tokenizer)
        decoder = self.tiny_decoder if self.decoder == "tiny" else self.autoencoder
        if not (self.checkpoint and text and decoder):
            find_weights(self.row.name)

    def all_files(self) -> list[Path]:
        """List the files of weights that `build` reads; all of them are there."""
        self.check_files()
        checkpoint, _, own = self._weights()
        parts = [checkpoint, *(choice.path for choice in own)]
        files = [file for part in parts for file in files_of(part, "backbone.checkpoint")]
        if not self.prompt_embeds:
            encoder, tokenizer = self._find_encoder()
            files += files_of(encoder, "backbone.text_encoder")
            files += sorted(file for file in tokenizer.iterdir() if file.is_file())
        decoder = self._find_autoencoder() if self.decoder == "full" else self._find_tiny_decoder()
        return [*files, *files_of(decoder, "backbone.autoencoder"), *self.added_files()]

    def added_files(self) -> list[Path]:
        """List the files of the LoRAs on top of the model: they decide what a run generates, and may change."""
        added = self._added()
        return [file for choice in added for file in files_of(choice.path, "backbone.loras", LORA_REMEDY)]

    def _added(self) -> list[LoraChoice]:
        return [read_choice(text, "backbone.loras") for text in self.loras]

    def _weights(self) -> tuple[Path, bool | None, list[LoraChoice]]:
        """Return the checkpoint, whether to use its EMA weights, and the LoRA that belongs to the model."""
        lora = from_home(self.lora) if self.lora else None
        alpha = self.lora_alpha or None
        if self.checkpoint:
            chosen = from_home(self.checkpoint)
            # A converted folder contains one set of weights; of a published file we use those its authors use.
            published = chosen.suffix in (".pt", ".pth") and self.row.name in SETS
            return chosen, SETS[self.row.name].ema if published else None, _own_lora(lora, alpha)
        files = find_weights(self.row.name)
        if lora is None:
            if alpha not in (None, files.lora_alpha):
                limit = f"its authors merge the LoRA of {self.row.name} with {files.lora_alpha}"
                raise refuse("backbone.lora_alpha", alpha, limit, "leave it out")
            lora, alpha = files.lora.path if files.lora else None, files.lora_alpha
        return files.checkpoint.path, files.ema, _own_lora(lora, alpha)

    def _find_encoder(self) -> tuple[Path, Path]:
        if self.text_encoder and self.tokenizer:
            return Path(self.text_encoder), Path(self.tokenizer)
        files = find_weights(self.row.name)
        return files.text_encoder.path, files.tokenizer[0].path.parent

    def _find_autoencoder(self) -> Path:
        return Path(self.autoencoder or find_weights(self.row.name).autoencoder.path)

    def _find_tiny_decoder(self) -> Path:
        path = self.tiny_decoder or find_tiny_decoder()
        if path is None:
            limit = "the tiny decoder is not installed"
            remedy = "put taew2_1.safetensors into the weights folder, or name it as backbone.tiny_decoder"
            raise refuse("backbone.decoder", self.decoder, limit, remedy)
        return Path(path)


def _own_lora(path: Path | None, alpha: float | None) -> list[LoraChoice]:
    return [] if path is None else [LoraChoice(path, alpha=alpha, whole=True)]


class SelfForcingConfig(WanConfig):
    """Self-Forcing is Wan2.1 1.3B distilled to four steps (public checkpoint, not for commercial use)."""

    row = ROWS["self-forcing"]


class InfiniteForcingConfig(WanConfig):
    """Infinite-Forcing is Wan2.1 1.3B trained with a one-frame sink, phases in the window (public checkpoint)."""

    row = ROWS["infinite-forcing"]


class LongLiveConfig(WanConfig):
    """LongLive is Wan2.1 1.3B tuned on long videos and prompt switches (public, not for commercial use)."""

    row = ROWS["longlive"]


class CausalForcingConfig(WanConfig):
    """Causal Forcing is Wan2.1 1.3B distilled to four steps from a causal teacher (public checkpoint)."""

    row = ROWS["causal-forcing"]


class CausalForcing2StepConfig(WanConfig):
    """Causal Forcing++ generates frame by frame in two steps: blocks of one latent frame (public checkpoint)."""

    row = ROWS["causal-forcing-2step"]


class CausalForcing1StepConfig(WanConfig):
    """Causal Forcing++ generates frame by frame in one step: blocks of one latent frame (public checkpoint)."""

    row = ROWS["causal-forcing-1step"]


def released_memory(name: str) -> dict[str, object]:
    """Return the memory that a model's public code uses, in the form of a config."""
    if name not in RELEASED:
        limit = "it has no public code of its own"
        raise refuse("--as-released", name, limit, f"choose one of {', '.join(RELEASED)}")
    frames = RELEASED[name].sink_frames
    return {"name": "sink", "sink_frames": frames} if frames else {"name": "none"}


def describe_memory(plan: Mapping[str, int], *, text: bool, on_host: int = 0) -> list[str]:
    """Return lines about the memory that a model will need, before any file is read.

    `on_host` bytes of the plan stay off the device; `text` says whether the text encoder may be needed.
    """
    lines = [f"memory: {name} {size / 1e9:.2f} GB" for name, size in plan.items()]
    where = f" on the device, {on_host / 1e9:.1f} GB on the host, layer by layer" if on_host else ""
    first = f"; before that, for new prompts, the text encoder alone {TEXT_ENCODER.size / 1e9:.1f} GB"
    total = (sum(plan.values()) - on_host) / 1e9
    return [*lines, f"memory: about {total:.1f} GB and activations{where}{first if text else ''}"]
