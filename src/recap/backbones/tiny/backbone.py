"""The embedded backbone is the smallest causal Wan, with weights that come with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.backbones.tiny.autoencoder import Autoencoder, StreamingDecoder
from recap.backbones.tiny.reading import PromptReader
from recap.backbones.tiny.vocabulary import TEXT_LENGTH, WORDS, Prompt, parse_prompt, token_ids
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from recap.io.weights import fill, open_tensors, without_storage

WEIGHTS = Path(__file__).parent / "weights"
"""Where the package keeps dit.safetensors, autoencoder.safetensors and text.safetensors."""
RELEASED = "install weights and code of the same release, or train them (training/)"


class WordTable(nn.Module):
    """Encodes text by one learnt vector per word of the vocabulary, and one per slot of the prompt.

    Without slots two actors have no order, and the model must choose again in every block who is where. Weights of
    the first edition have none.
    """

    def __init__(self, spec: WanSpec = EMBEDDED, *, slots: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), spec.text_dim)
        self.slots = nn.Parameter(torch.empty(TEXT_LENGTH, spec.text_dim).normal_(std=0.5)) if slots else None

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (...) L as (...) L text_dim."""
        embedded: Tensor = self.words(ids)
        return embedded if self.slots is None else embedded + self.slots

    @torch.no_grad()
    def encode(self, prompt: Prompt | str) -> Tensor:
        """Embed a prompt as 1 L text_dim; words outside the vocabulary are refused with suggestions."""
        ids = token_ids(prompt, as_named=self.slots is not None)
        embedded: Tensor = self(torch.tensor([ids], device=self.words.weight.device))
        return embedded


def has_slots(file: Path) -> bool:
    """Tell whether stored words have slots; False for an unreadable file, which is refused when it is loaded."""
    try:
        return "slots" in open_tensors(file, "weights")
    except ValueError:
        return False


def build_embedded(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    folder: Path = WEIGHTS,
    read: Callable[[str], Prompt] = parse_prompt,
) -> WanBackbone:
    """Load the weights of a folder, by default the package's; `read` turns a text into a prompt."""
    # Without storage, because random weights would be overwritten at once.
    with without_storage():
        model, autoencoder = CausalWan(EMBEDDED), Autoencoder()
        text = WordTable(slots=has_slots(folder / "text.safetensors"))
    for part, name in ((model, "dit"), (autoencoder, "autoencoder"), (text, "text")):
        load_strictly(part, folder / f"{name}.safetensors")
    autoencoder.eval().requires_grad_(False).to(device, dtype)
    # Convolutions run fastest with the channels innermost; torch's hints do not know this call.
    autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    text.requires_grad_(False).to(device)
    return WanBackbone(
        model.to(device=device, dtype=dtype),
        lambda prompt: text.encode(read(prompt)),
        lambda: StreamingDecoder(autoencoder),
        lambda pixels: autoencoder.encode(pixels.to(autoencoder.latent_mean.device, dtype)),
        autoencoder=autoencoder,
    )


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """Generates with a small causal Wan that we trained, with weights in the package."""

    def build(
        self, *, device: str, dtype: torch.dtype, notice: Callable[[str], None] = print, **_: object
    ) -> WanBackbone:
        return build_embedded(device, dtype, read=PromptReader(notice))


def load_strictly(module: nn.Module, file: Path, field: str = "weights", remedy: str = RELEASED) -> None:
    """Fill a module from a safetensors file, as fp32; any missing, unknown or misshapen tensor is an error."""
    tensors = open_tensors(file, field, remedy)
    fill(module, tensors, path=file, field=field, dtype=torch.float32, remedy=remedy)
