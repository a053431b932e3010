"""This module turns prompts into embeddings: by UMT5-XXL for the public models, by hashed words for untrained ones.

UMT5 is transformers' model with the weights of Wan's own file. Prompts are cleaned (ftfy), their whitespace is
collapsed, and they are cut or padded to the model's slots. They are encoded with the padding masked out, and the
embeddings of the padding are set to zero, as in training. The encoder, eleven gigabytes, is loaded only for new
prompts: an embedding is stored on disk under a hash of everything it depends on, so models can share the folder.
"""

from __future__ import annotations

import gc
import hashlib
import html
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recap.errors import refuse
from recap.io.devices import place_encoder
from recap.io.extras import import_extra
from recap.io.files import from_home, staged_file, weights_folder
from recap.io.report import Notice
from recap.io.weights import REMEDY, Stored, files_of, fill, load_pickle, open_file, open_tensors, rename

EncodeText = Callable[[str], Tensor]
"""Encodes a prompt as 1 text_len text_dim."""

FIELD = "text encoder"
BLOCK = re.compile(r"(?:encoder\.block|blocks)\.(\d+)\.")
# Tokens farther apart share the last bucket of relative positions; the shapes of the file do not show this number.
FARTHEST = 128
NAME = "prompt_embeds"
# Part of every hash, so that a change of the file layout ignores old files.
LAYOUT = "recap text 1"
SAMPLES, SAMPLE_BYTES = 256, 4096
# A `.pth` is a zip, which ends with the checksums of all its parts.
TAIL_BYTES = 2**20
# The precision of the encoder and of the stored embeddings.
PRECISION = torch.bfloat16

SHARED, EMBED = "shared.weight", "encoder.embed_tokens.weight"
"""transformers has these two names for the table of word vectors."""

TO_WAN = (
    (r"^(shared|encoder\.embed_tokens)\.", "token_embedding."),
    (r"^encoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.block\.(\d+)\.", r"blocks.\1."),
    (r"\.layer\.0\.layer_norm\.", ".norm1."),
    (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".pos_embedding.embedding."),
    (r"\.layer\.0\.SelfAttention\.", ".attn."),
    (r"\.layer\.1\.layer_norm\.", ".norm2."),
    (r"\.layer\.1\.DenseReluDense\.wi_0\.", ".ffn.gate.0."),
    (r"\.layer\.1\.DenseReluDense\.wi_1\.", ".ffn.fc1."),
    (r"\.layer\.1\.DenseReluDense\.wo\.", ".ffn.fc2."),
)
"""Maps transformers' names to those of `models_t5_umt5-xxl-enc-bf16.pth`."""


def wan_name(name: str) -> str:
    """Return the name in Wan's file of a tensor of transformers' `UMT5EncoderModel`."""
    return rename(name, TO_WAN)


def clean_prompt(prompt: str) -> str:
    """Repair broken Unicode, undo HTML escapes (twice: escaped escapes are common) and collapse whitespace.

    ftfy is required: without it some prompts would silently reach the model in a form that it never saw.
    """
    fixed: str = import_extra("ftfy").fix_text(prompt)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(fixed))).strip()


class TokenIds(NamedTuple):
    """Holds a prompt as the encoder reads it; the last token is the end of the sentence."""

    # 1 L, int64, zero after the prompt.
    ids: Tensor
    # 1 L, int64: one where there is a token.
    mask: Tensor


class Umt5Tokenizer:
    """Cleans and tokenises prompts to a fixed length."""

    def __init__(self, folder: Path, text_len: int, notice: Notice = print) -> None:
        """Open a tokenizer: Wan's folder `google/umt5-xxl`, or the `tokenizer/` of a diffusers folder."""
        folder = from_home(folder)
        # Without this check transformers would take the name for a model to download.
        if not folder.is_dir():
            raise refuse("tokenizer", str(folder), "no such folder", "pass the folder with spiece.model")
        if not (folder / "tokenizer.json").is_file():
            # transformers reads spiece.model through it, and where it is missing asks for something else.
            import_extra("google.protobuf")
        automatic = import_extra("transformers").AutoTokenizer
        try:
            self._tokenizer = automatic.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError, RuntimeError) as problem:
            reason = str(problem).partition("\n")[0]
            limit = f"no tokenizer can be read from it ({reason})"
            remedy = "pass the folder with spiece.model and tokenizer_config.json"
            raise refuse("tokenizer", str(folder), limit, remedy) from problem
        self.text_len = text_len
        self._notice = notice

    def __call__(self, prompt: str) -> TokenIds:
        """Clean a prompt and return its ids; a notice reports a prompt that is too long."""
        cleaned = clean_prompt(prompt)
        every = self._tokenizer(cleaned)["input_ids"]
        if len(every) > self.text_len:
            start = cleaned if len(cleaned) <= 40 else f"{cleaned[:40]}…"
            counts = f"{len(every)} tokens, and the model reads {self.text_len}"
            self._notice(f"prompt {start!r}: {counts}; the end is cut off")
        fixed = {"max_length": self.text_len, "padding": "max_length", "truncation": True}
        cut = self._tokenizer(cleaned, **fixed, return_attention_mask=True, return_tensors="pt")
        return TokenIds(cut["input_ids"], cut["attention_mask"])


class Umt5Encoder:
    """Turns token ids into embeddings."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, tokens: TokenIds) -> Tensor:
        """Return 1 L text_dim in the model's precision, on its device; embeddings of the padding are zero."""
        device, slots = self._model.device, tokens.ids.shape[1]
        # Words do not read the padding, most of the work on a CPU; a GPU computes as the released codes do.
        length = int(tokens.mask.sum()) if device.type == "cpu" else slots
        ids, mask = (part[:, :length].to(device) for part in tokens)
        found: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        # Filled instead of multiplied, because the padding may contain infinities.
        words = found.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        return torch.nn.functional.pad(words, (0, 0, 0, slots - length))


def load_umt5(
    path: Path, text_dim: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Umt5Encoder:
    """Load the encoder from Wan's `models_t5_umt5-xxl-enc-bf16.pth` (or the same names in safetensors).

    The path may also be a folder in diffusers' layout: `text_encoder/` itself, or the model folder with it.
    """
    path = weights_path(path)
    found = open_tensors(path, FIELD)
    if path.is_dir():
        found = _with_one_table(found, path)
    in_file = _own_name if path.is_dir() else wan_name
    sizes = _sizes(found, path, in_file)
    if sizes["d_model"] != text_dim:
        limit = f"its embeddings have {sizes['d_model']} channels, and this model reads {text_dim}"
        raise refuse(FIELD, str(path), limit, "pass the text encoder that came with the model")
    transformers = import_extra("transformers")
    with torch.device("meta"):
        model = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    names = {name: in_file(name) for name in model.state_dict()}
    fill(model, found, path=path, field=FIELD, dtype=dtype, names=names, copy=False)
    # One parameter again, or a move to another device would make two tables of two gigabytes.
    model.shared.weight = model.encoder.embed_tokens.weight
    # Some releases of transformers leave an empty table, and the video then ignores the prompt.
    if not model.to(device).shared.weight.any():
        raise refuse(FIELD, str(path), "its word vectors are all zero", REMEDY)
    return Umt5Encoder(model)


def weights_path(path: Path) -> Path:
    """Return the file, or the folder of shards, that a user's path to the encoder stands for."""
    path = from_home(path)
    return path / "text_encoder" if (path / "text_encoder").is_dir() else path


def _with_one_table(found: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    """Return the tensors with the table of word vectors under one name; savers use either of two names, or both."""
    tables = [found[name].read() for name in (SHARED, EMBED) if name in found]
    if len(tables) == 2 and not torch.equal(*tables):
        limit = f"{SHARED} and {EMBED} must be one table, but differ"
        raise refuse(FIELD, str(path), limit, REMEDY)
    return {_own_name(name): tensor for name, tensor in found.items()}


def _own_name(name: str) -> str:
    return SHARED if name == EMBED else name


def _sizes(found: Mapping[str, Stored], path: Path, file_name: Callable[[str], str]) -> dict[str, Any]:
    """Return the configuration that follows from the shapes in a file."""

    def shape(name: str) -> tuple[int, int]:
        tensor = found.get(file_name(name))
        if tensor is None or len(tensor.shape) != 2 or 0 in tensor.shape:
            limit = f"{file_name(name)} is missing or not a matrix"
            raise refuse(FIELD, str(path), limit, "pass the weights of a UMT5 encoder")
        return tensor.shape[0], tensor.shape[1]

    block = "encoder.block.{}.layer.{}"
    attention = block.format(0, 0) + ".SelfAttention"
    vocabulary, width = shape(SHARED)
    buckets, heads = shape(f"{attention}.relative_attention_bias.weight")
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shape(f"{attention}.q.weight")[0] // heads,
        "d_ff": shape(f"{block.format(0, 1)}.DenseReluDense.wo.weight")[1],
        "num_layers": len({match[1] for match in map(BLOCK.match, found) if match}),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": FARTHEST,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
    }


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
        self._encoder = encoder
        self._tokenizer = Umt5Tokenizer(tokenizer, text_len, notice)
        self._identity = encoder_identity(encoder)
        self._cache = cache
        self._shape = (1, text_len, text_dim)
        self._device = torch.device(device)
        self._notice = notice
        self._embeddings: dict[str, Tensor] = {}

    def prepare(self, prompts: Iterable[str], device: torch.device | str | None = None) -> None:
        """Load or compute these prompts' embeddings; the encoder is loaded once at most, on `device` or its own."""
        files = {prompt: self._file(prompt) for prompt in prompts if prompt not in self._embeddings}
        wanted = dict(files.values())
        found = {path: stored for path in wanted if (stored := self._read(path)) is not None}
        missing = {path: tokens for path, tokens in wanted.items() if path not in found}
        if missing:
            found |= self._encode(missing, self._device if device is None else torch.device(device))
        self._embeddings |= {prompt: found[path] for prompt, (path, _) in files.items()}

    def __call__(self, prompt: str) -> Tensor:
        if prompt not in self._embeddings:
            self.prepare([prompt])
        return self._embeddings[prompt]

    def _file(self, prompt: str) -> tuple[Path, TokenIds]:
        """Return the file of a prompt's embedding, whether or not it exists, and the prompt's tokens."""
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

    def _encode(self, missing: Mapping[Path, TokenIds], device: torch.device) -> dict[Path, Tensor]:
        place = place_encoder(files_of(weights_path(self._encoder), FIELD), device, self._notice)
        encoder = load_umt5(self._encoder, self._shape[2], place, PRECISION)
        made = {}
        for path, tokens in missing.items():
            made[path] = encoder(tokens).cpu()
            self._keep(path, made[path])
        # The transformer is loaded next and needs the memory.
        del encoder
        gc.collect()
        torch.cuda.empty_cache()
        return made

    def _keep(self, path: Path, embedding: Tensor) -> None:
        try:
            with staged_file(path) as staged:
                save_file({NAME: embedding.contiguous()}, staged)
        except (OSError, SafetensorError) as problem:
            # A full disk raises either.
            reason = f"{path.parent} cannot be written ({problem})"
            self._notice(f"text cache: {reason}; embeddings are not stored")


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
    path = from_home(path)
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


def open_text(
    prompt_embeds: str,
    find_encoder: Callable[[], tuple[Path, Path]],
    size: tuple[int, int],
    *,
    device: str,
    prompts: Sequence[str],
    notice: Notice,
    negative: str | None = None,
    later: str = "cpu",
) -> EncodeText:
    """Return the text encoder of a public model, with the embeddings of `prompts` and of `negative` ready.

    `find_encoder` returns the paths of weights and tokenizer; `size` is text_len and text_dim. These prompts are
    encoded on `device`, before the transformer is there, others on `later`: so the two never share a card. A file
    of `prompt_embeds` replaces the encoder: every prompt gets its first row, `negative` its second.
    """
    every = [*prompts, *([] if negative is None else [negative])]
    if not prompt_embeds:
        where = (*find_encoder(), weights_folder() / "text")
        text = CachedText(*where, text_len=size[0], text_dim=size[1], device=later, notice=notice)
        text.prepare(every, device)
        return text
    embeds = load_prompt_embeds(Path(prompt_embeds), *size)
    rows = 1 if negative is None else 2
    if len(embeds) != rows:
        second = "" if negative is None else ", the negative prompt the second"
        limit = f"it holds {len(embeds)} rows; every prompt gets the first{second}"
        raise refuse("backbone.prompt_embeds", prompt_embeds, limit, f"save {rows}")
    return lambda prompt: embeds[-1:] if prompt == negative else embeds[:1]


class HashedWords:
    """Embeds a prompt as one random unit Gaussian vector per word, zeros after the last word.

    Different prompts get different embeddings, and no more: words with similar meanings are as far apart as any two.
    """

    def __init__(self, text_len: int, text_dim: int) -> None:
        self.text_len = text_len
        self.text_dim = text_dim

    def __call__(self, prompt: str) -> Tensor:
        """Return 1 text_len text_dim, fp32 on the CPU; words after the last slot are dropped, case is ignored."""
        words = re.findall(r"\w+", prompt.lower())[: self.text_len]
        slots = torch.zeros(1, self.text_len, self.text_dim)
        for index, word in enumerate(words):
            # A checksum, because Python's hash of a string differs between processes.
            generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
            slots[0, index] = torch.randn(self.text_dim, generator=generator)
        return slots
