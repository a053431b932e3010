"""The embedded backbone: the smallest causal Wan, with weights that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from recap.backbones.tiny.autoencoder import Autoencoder, StreamingDecoder
from recap.backbones.tiny.reading import PromptReader
from recap.backbones.tiny.vocabulary import TEXT_LENGTH, WORDS, Prompt, parse_prompt, token_ids
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from recap.errors import refuse

WEIGHTS = Path(__file__).parent / "weights"
"""Where the package keeps dit.safetensors, autoencoder.safetensors and text.safetensors."""


class WordTable(nn.Module):
    """The whole text encoder: one learnt vector per word of the vocabulary, and one per slot of the prompt.

    Without slots two actors have no order, and the model must choose again in every block who is where. Weights of
    the first edition have none.
    """

    def __init__(self, spec: WanSpec = EMBEDDED, num_words: int = len(WORDS), *, slots: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, spec.text_dim)
        self.slots = nn.Parameter(0.5 * torch.randn(TEXT_LENGTH, spec.text_dim)) if slots else None

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
        with safe_open(file, "pt") as stored:
            return "slots" in stored.keys()  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        return False


def build_embedded(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    folder: Path = WEIGHTS,
    read: Callable[[str], Prompt] = parse_prompt,
) -> WanBackbone:
    """Load the weights of a folder, by default the package's; `read` turns a text into a prompt."""
    # Without storage, because random weights would be overwritten at once.
    with torch.device("meta"):
        model, autoencoder = CausalWan(EMBEDDED), Autoencoder()
        text = WordTable(slots=has_slots(folder / "text.safetensors"))
    load_strictly(model, folder / "dit.safetensors")
    load_strictly(autoencoder, folder / "autoencoder.safetensors")
    load_strictly(text, folder / "text.safetensors")
    autoencoder.eval().requires_grad_(False).to(device, dtype)
    # Convolutions run fastest with the channels innermost; torch's hints do not know this call.
    autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    text.requires_grad_(False).to(device)
    return WanBackbone(
        model.to(device=device, dtype=dtype),
        lambda prompt: text.encode(read(prompt)),
        lambda: StreamingDecoder(autoencoder),
        lambda pixels: autoencoder.encode(pixels.to(device, dtype)),
    )


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """A small causal Wan that we trained, with weights in the package."""

    def build(
        self, *, device: str, dtype: torch.dtype, notice: Callable[[str], None] = print, **_: object
    ) -> WanBackbone:
        return build_embedded(device, dtype, read=PromptReader(notice))


def load_strictly(module: nn.Module, file: Path) -> None:
    """Fill a module from a safetensors file, as fp32; any missing, unknown or misshapen tensor is an error."""
    if not file.is_file():
        limit = "the embedded backbone's weights are not there"
        raise refuse("weights", file.name, limit, "install the released package, or train them (training/)")
    try:
        stored = load_file(file)
    except SafetensorError as error:
        raise refuse("weights", str(file), f"not a safetensors file ({error})", "fetch it again") from error
    faults = _faults(module.state_dict(), stored)
    if faults:
        limit = f"does not fit {type(module).__name__}: {'; '.join(faults)}"
        raise refuse("weights", str(file), limit, "use weights and code of the same release")
    module.load_state_dict({name: tensor.float() for name, tensor in stored.items()}, assign=True)


def _faults(wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with stored tensors, one line per kind of fault, by name."""
    missing = sorted(wanted.keys() - stored.keys())
    unknown = sorted(stored.keys() - wanted.keys())
    misshapen = [
        f"{name} {list(stored[name].shape)} for {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & stored.keys())
        if stored[name].shape != wanted[name].shape
    ]
    kinds = (("missing", missing), ("unknown", unknown), ("misshapen", misshapen))
    return [f"{kind} {', '.join(names)}" for kind, names in kinds if names]
