"""The public causal Wan models as backbones: one class each, and one way to load them.

Every part may be named by path; the others are looked for where `recap weights` puts them. The text encoder is
loaded and released before the transformer is read, so the two are never on the device together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.cached_text import CachedText, load_prompt_embeds
from recap.backbones.wan.checkpoint import load_checkpoint
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.published import SETS, WanFiles, find_weights
from recap.backbones.wan.spec import (
    INFINITE_FORCING,
    LONGLIVE,
    RELEASED,
    SELF_FORCING,
    WanSpec,
    as_released,
)
from recap.backbones.wan.taehv import Taehv, load_taehv
from recap.backbones.wan.vae import WanVae, load_wan_vae
from recap.errors import refuse, unknown_name
from recap.io.files import weights_folder
from recap.io.report import Notice

DECODERS = ("full", "tiny")
TEXT_ENCODER_BYTES = 11_361_920_418
AUTOENCODER_PARAMETERS = 126_892_531


@dataclass(frozen=True, slots=True)
class WanConfig:
    """The files and settings of a public model; "" stands for the file that `recap weights` installed."""

    checkpoint: str = ""
    lora: str = ""
    # The alpha of a LoRA whose files do not state it; 0 means that they do.
    lora_alpha: float = 0.0
    text_encoder: str = ""
    tokenizer: str = ""
    autoencoder: str = ""
    # "full", or "tiny": a small public one, twenty times faster.
    decoder: str = "full"
    tiny_decoder: str = ""
    # A file of embeddings that replaces the text encoder, for every prompt.
    prompt_embeds: str = ""
    # The window and phases of the public code instead of the paper's shared setting.
    as_released: bool = False

    row: ClassVar[WanSpec]

    def __post_init__(self) -> None:
        if self.decoder not in DECODERS:
            raise unknown_name("backbone.decoder", self.decoder, DECODERS)

    @property
    def spec(self) -> WanSpec:
        return as_released(self.row) if self.as_released else self.row

    def build(
        self, *, device: str, dtype: torch.dtype, prompts: Sequence[str], notice: Notice
    ) -> WanBackbone:
        spec = self.spec
        self.check_files()
        for line in memory_plan(spec, dtype, text=not self.prompt_embeds):
            notice(line)
        encode = self._text(spec, device, prompts, notice)
        with torch.device("meta"):
            model = CausalWan(spec)
        checkpoint, ema, lora, alpha = self._weights()
        load_checkpoint(model, checkpoint, dtype=dtype, device=device, ema=ema, lora=lora, lora_alpha=alpha)
        # Only what is used is read: with the tiny decoder the full one is needed only to encode pictures.
        full = cache(lambda: self._vae(device, dtype))
        decodes = self._tiny(device, dtype) if self.decoder == "tiny" else full()
        return WanBackbone(
            model, encode, decodes.open_decoder, lambda pixels: full().encode(pixels), autoencoder=decodes
        )

    def check_files(self) -> None:
        """Refuse, before a long sweep begins, if a part that no path names is not installed; reads no file."""
        text = self.prompt_embeds or (self.text_encoder and self.tokenizer)
        decoder = self.tiny_decoder if self.decoder == "tiny" else self.autoencoder
        if not (self.checkpoint and text and decoder):
            self._files()

    def _files(self) -> WanFiles:
        return find_weights(self.row.name)

    def _weights(self) -> tuple[Path, bool | None, Path | None, float | None]:
        """Return checkpoint, whether to use its EMA weights, adapter, and its alpha where the file states none."""
        lora = Path(self.lora).expanduser() if self.lora else None
        alpha = self.lora_alpha or None
        if self.checkpoint:
            chosen = Path(self.checkpoint).expanduser()
            # A converted folder contains one set of weights; of a published file we use those its authors use.
            published = chosen.suffix in (".pt", ".pth") and self.row.name in SETS
            return chosen, SETS[self.row.name].ema if published else None, lora, alpha
        files = self._files()
        if lora is not None:
            return files.checkpoint, files.ema, lora, alpha
        if alpha not in (None, files.lora_alpha):
            limit = f"its authors merge the LoRA of {self.row.name} with {files.lora_alpha}"
            raise refuse("backbone.lora_alpha", alpha, limit, "leave it out")
        return files.checkpoint, files.ema, files.lora, files.lora_alpha

    def _text(
        self, spec: WanSpec, device: str, prompts: Sequence[str], notice: Notice
    ) -> Callable[[str], Tensor]:
        if self.prompt_embeds:
            embeds = load_prompt_embeds(Path(self.prompt_embeds), spec.text_len, spec.text_dim)
            if len(embeds) != 1:
                limit = f"it contains {len(embeds)} rows, and every prompt gets the same one"
                raise refuse("backbone.prompt_embeds", self.prompt_embeds, limit, "save one row")
            return lambda prompt: embeds
        named = bool(self.text_encoder and self.tokenizer)
        text = CachedText(
            Path(self.text_encoder).expanduser() if named else self._files().text_encoder,
            Path(self.tokenizer).expanduser() if named else self._files().tokenizer,
            weights_folder() / "text",
            text_len=spec.text_len,
            text_dim=spec.text_dim,
            device=device,
            notice=notice,
        )
        text.prepare(prompts)
        return text

    def _vae(self, device: str, dtype: torch.dtype) -> WanVae:
        path = Path(self.autoencoder).expanduser() if self.autoencoder else self._files().autoencoder
        return load_wan_vae(path, device, dtype)

    def _tiny(self, device: str, dtype: torch.dtype) -> Taehv:
        path = Path(self.tiny_decoder).expanduser() if self.tiny_decoder else self._files().tiny_decoder
        if path is None:
            limit = "the tiny decoder is not installed"
            remedy = "put taew2_1.safetensors into the weights folder, or name it as backbone.tiny_decoder"
            raise refuse("backbone.decoder", self.decoder, limit, remedy)
        return load_taehv(path, device, dtype)


@dataclass(frozen=True, slots=True)
class SelfForcingConfig(WanConfig):
    """Self-Forcing, Wan2.1 1.3B distilled to four steps (public checkpoint, not for commercial use)."""

    row = SELF_FORCING


@dataclass(frozen=True, slots=True)
class InfiniteForcingConfig(WanConfig):
    """Infinite-Forcing, Wan2.1 1.3B trained with a one-frame sink and phases in the window (public checkpoint)."""

    row = INFINITE_FORCING


@dataclass(frozen=True, slots=True)
class LongLiveConfig(WanConfig):
    """LongLive, Wan2.1 1.3B tuned on long videos and prompt switches (public checkpoint, not for commercial use)."""

    row = LONGLIVE


def released_memory(name: str) -> dict[str, object]:
    """Return the memory that a model's public code uses, in the form of a config."""
    if name not in RELEASED:
        limit = "it has no public code of its own"
        raise refuse("--as-released", name, limit, f"choose one of {', '.join(RELEASED)}")
    frames = RELEASED[name].sink_frames
    return {"name": "sink", "sink_frames": frames} if frames else {"name": "none"}


def memory_plan(spec: WanSpec, dtype: torch.dtype, *, text: bool) -> list[str]:
    """Describe the memory that a model will need, before any file is read."""
    size = dtype.itemsize
    with torch.device("meta"):
        parameters = sum(p.numel() for p in CausalWan(spec).parameters())
    frame = 2 * spec.layers * spec.grid[0] * spec.grid[1] * spec.dim * size
    # The window, and a bank of one frame's tokens.
    frames = spec.window_frames + 1
    parts = {
        "transformer": parameters * size,
        "autoencoder": AUTOENCODER_PARAMETERS * size,
        f"keys and values of {frames} frames, stored and as read": 2 * frames * frame,
    }
    total = sum(parts.values())
    lines = [f"memory: {name} {amount / 1e9:.2f} GB" for name, amount in parts.items()]
    first = f"; before that, for new prompts, the text encoder alone {TEXT_ENCODER_BYTES / 1e9:.1f} GB"
    return [*lines, f"memory: about {total / 1e9:.1f} GB and activations{first if text else ''}"]
