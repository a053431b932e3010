"""A cache for embeddings of prompts: the encoder, eleven gigabytes, is loaded only for new prompts.

An embedding is stored on disk under a hash of everything it depends on, so models can share a cache folder, and a
second run with the same prompts does not load the encoder.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recap.backbones.wan.umt5 import FIELD, TokenIds, Umt5Tokenizer, load_umt5, weights_path
from recap.errors import refuse
from recap.io.files import staged_file
from recap.io.report import Notice
from recap.io.weights import files_of, load_pickle, open_file

NAME = "prompt_embeds"
# Part of every hash, so that a change of the file layout ignores old files.
LAYOUT = "recap text 1"
SAMPLES, SAMPLE_BYTES = 256, 4096
# A `.pth` is a zip, which ends with the checksums of all its parts.
TAIL_BYTES = 2**20
# The precision of the encoder and of the stored embeddings.
PRECISION = torch.bfloat16


class CachedText:
    """Encodes a prompt as 1 text_len text_dim on the CPU; the encoder is in memory only while it is needed."""

    def __init__(
        self,
        encoder: Path,
        tokenizer: Path,
        cache: Path,
        *,
        text_len: int,
        text_dim: int,
        device: torch.device | str = "cpu",
        notice: Notice = print,
    ) -> None:
        self._encoder = Path(encoder)
        self._tokenizer_folder = Path(tokenizer)
        self._cache = Path(cache).expanduser()
        self._shape = (1, text_len, text_dim)
        self._device = torch.device(device)
        self._notice = notice
        self._tokenizer: Umt5Tokenizer | None = None
        self._identity: str | None = None
        self._embeddings: dict[str, Tensor] = {}

    def prepare(self, prompts: Iterable[str]) -> None:
        """Load or compute the embeddings of all these prompts, loading the encoder at most once."""
        missing: dict[Path, TokenIds] = {}
        files = {prompt: self._file(prompt) for prompt in prompts if prompt not in self._embeddings}
        found: dict[Path, Tensor] = {}
        for path, tokens in files.values():
            stored = self._read(path)
            if stored is None:
                missing[path] = tokens
            else:
                found[path] = stored
        if missing:
            found |= self._encode(missing)
        self._embeddings |= {prompt: found[path] for prompt, (path, _) in files.items()}

    def __call__(self, prompt: str) -> Tensor:
        if prompt not in self._embeddings:
            self.prepare([prompt])
        return self._embeddings[prompt]

    def _file(self, prompt: str) -> tuple[Path, TokenIds]:
        """Return the file of a prompt's embedding, whether or not it exists, and the prompt's tokens."""
        if self._tokenizer is None:
            self._tokenizer = Umt5Tokenizer(self._tokenizer_folder, self._shape[1], self._notice)
        if self._identity is None:
            self._identity = encoder_identity(self._encoder)
        tokens = self._tokenizer(prompt)
        # The key is what the encoder sees: prompts that differ in spaces share a file, different tokenizers do not.
        ids = ",".join(str(token) for token in tokens.ids[0].tolist())
        key = "\n".join([LAYOUT, self._identity, str(PRECISION), ids])
        return self._cache / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors", tokens

    def _read(self, path: Path) -> Tensor | None:
        if not path.is_file():
            return None
        try:
            stored = load_file(path).get(NAME)
        except (OSError, SafetensorError):
            stored = None
        if stored is None or stored.shape != self._shape or not stored.isfinite().all():
            self._notice(f"text cache: {path.name} is damaged, its prompt is encoded again")
            return None
        return stored

    def _encode(self, missing: Mapping[Path, TokenIds]) -> dict[Path, Tensor]:
        encoder = load_umt5(self._encoder, self._shape[2], self._device, PRECISION)
        made = {}
        for path, tokens in missing.items():
            made[path] = encoder(tokens).cpu()
            self._keep(path, made[path])
        # The transformer is loaded next and needs the memory.
        del encoder
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return made

    def _keep(self, path: Path, embedding: Tensor) -> None:
        try:
            with staged_file(path) as staged:
                save_file({NAME: embedding.contiguous()}, staged)
        except (OSError, SafetensorError) as problem:
            # A full disk raises either.
            self._notice(
                f"text cache: {path.parent} cannot be written ({problem}); embeddings are not stored"
            )


def encoder_identity(path: Path) -> str:
    """Return a hash of the encoder's content, wherever it is stored: file sizes and samples of the bytes.

    Reading all 11 GB would take longer than encoding, and weights of two trainings differ in every sample.
    """
    digest = hashlib.sha256()
    for file in files_of(weights_path(path), FIELD):
        size = file.stat().st_size
        digest.update(f"{size};".encode())
        with file.open("rb") as content:
            for sample in range(SAMPLES):
                content.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
            content.seek(max(size - TAIL_BYTES, 0))
            digest.update(content.read())
    return digest.hexdigest()


def load_prompt_embeds(path: Path, text_len: int, text_dim: int) -> Tensor:
    """Load embeddings B text_len text_dim from a `.pt` (a tensor, or a dict) or a safetensors file.

    In a dict or a safetensors file they are called `prompt_embeds`; missing slots are filled with zeros, as in the
    encoder's own padding.
    """
    path = Path(path).expanduser()
    field = "prompt embeddings"
    if not path.is_file():
        raise refuse(field, str(path), "no such file", "check the path")
    remedy = f"save {{{NAME!r}: tensor}} with torch.save"
    found: object
    if path.suffix == ".safetensors":
        stored = open_file(path, field, remedy).get(NAME)
        found = stored and stored.read()
    else:
        found = load_pickle(path, field, remedy)
    if isinstance(found, Mapping):
        found = found.get(NAME)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        limit = f"it holds no tensor of floats, alone or under the name {NAME!r}"
        raise refuse(field, str(path), limit, remedy)
    rows = found.unsqueeze(0) if found.dim() == 2 else found
    wanted = f"rows of up to {text_len} slots of {text_dim} channels"
    if rows.dim() != 3 or 0 in rows.shape or rows.shape[1] > text_len or rows.shape[2] != text_dim:
        raise refuse(f"{field} in {path.name}", tuple(found.shape), f"the model reads {wanted}", "pass B L C")
    if not rows.isfinite().all():
        raise refuse(field, str(path), "it contains values that are not finite", "encode the prompt again")
    return torch.nn.functional.pad(rows, (0, 0, 0, text_len - rows.shape[1]))
