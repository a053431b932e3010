"""The text encoder of the Wan family: transformers' UMT5-XXL, with the weights of Wan's own file.

Prompts are cleaned (ftfy), their whitespace is collapsed, and they are cut or padded to the model's slots. They are
encoded with the padding masked out, and the embeddings of the padding are set to zero, as in training.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recap.errors import refuse
from recap.io.extras import import_extra
from recap.io.report import Notice
from recap.io.weights import REMEDY, Stored, fill, open_tensors

FIELD = "text encoder"
BLOCK = re.compile(r"(?:encoder\.block|blocks)\.(\d+)\.")
# Tokens farther apart share the last bucket of relative positions; the shapes of the file do not show this number.
FARTHEST = 128


SHARED, EMBED = "shared.weight", "encoder.embed_tokens.weight"
"""The two names that transformers has for the table of word vectors."""

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
"""transformers' names -> those of `models_t5_umt5-xxl-enc-bf16.pth`."""


def wan_name(name: str) -> str:
    """Return the name in Wan's file of a tensor of transformers' `UMT5EncoderModel`."""
    for ours, theirs in TO_WAN:
        name = re.sub(ours, theirs, name)
    return name


def clean_prompt(prompt: str) -> str:
    """Repair broken Unicode, undo HTML escapes (twice: escaped escapes are common) and collapse whitespace.

    ftfy is required: without it some prompts would silently reach the model in a form that it never saw.
    """
    mended: str = import_extra("ftfy").fix_text(prompt)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(mended))).strip()


class TokenIds(NamedTuple):
    """A prompt as the encoder reads it; the last token is the end of the sentence."""

    # 1 L, int64, zero after the prompt.
    ids: Tensor
    # 1 L, int64: one where there is a token.
    mask: Tensor


class Umt5Tokenizer:
    """Cleans and tokenises prompts to a fixed length."""

    def __init__(self, folder: Path, text_len: int, notice: Notice = print) -> None:
        """Open a tokenizer: Wan's folder `google/umt5-xxl`, or the `tokenizer/` of a diffusers folder."""
        folder = Path(folder).expanduser()
        # Without this check transformers would take the name for a model to download.
        if not folder.is_dir():
            raise refuse("tokenizer", str(folder), "no such folder", "pass the folder with spiece.model")
        if not (folder / "tokenizer.json").is_file():
            # transformers reads spiece.model through it, and where it is missing asks for something else.
            import_extra("google.protobuf")
        try:
            self._tokenizer = import_extra("transformers").AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
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
        every = self._tokenizer(cleaned, add_special_tokens=True)["input_ids"]
        if len(every) > self.text_len:
            start = cleaned if len(cleaned) <= 40 else f"{cleaned[:40]}…"
            self._notice(
                f"prompt {start!r}: {len(every)} tokens, and the model reads {self.text_len}; the end is cut off"
            )
        cut = self._tokenizer(
            cleaned,
            add_special_tokens=True,
            max_length=self.text_len,
            padding="max_length",
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return TokenIds(cut["input_ids"], cut["attention_mask"])


class Umt5Encoder:
    """Turns token ids into embeddings."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, tokens: TokenIds) -> Tensor:
        """Return 1 L text_dim in the model's precision, on its device; embeddings of the padding are zero."""
        ids, mask = (part.to(self._model.device) for part in tokens)
        found: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        # Filled instead of multiplied, because the padding may contain infinities.
        return found.masked_fill(mask.unsqueeze(-1) == 0, 0.0)


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
    sizes = _sizes(found, path, (lambda name: name) if path.is_dir() else wan_name)
    if sizes["d_model"] != text_dim:
        limit = f"its embeddings have {sizes['d_model']} channels, and this model reads {text_dim}"
        raise refuse(FIELD, str(path), limit, "pass the text encoder that came with the model")
    transformers = import_extra("transformers")
    with torch.device("meta"):
        model = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    names = {name: SHARED if name == EMBED else name for name in model.state_dict()}
    if not path.is_dir():
        names = {name: wan_name(name) for name in names}
    fill(model, found, path=path, field=FIELD, dtype=dtype, names=names, copy=False)
    # One parameter again, or a move to another device would make two tables of two gigabytes.
    model.shared.weight = model.encoder.embed_tokens.weight
    model.to(device)
    _check_table(model, path)
    return Umt5Encoder(model)


def weights_path(path: Path) -> Path:
    """Return the file, or the folder of shards, that a user's path to the encoder stands for."""
    path = Path(path).expanduser()
    return path / "text_encoder" if (path / "text_encoder").is_dir() else path


def _with_one_table(found: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    """Savers keep the table of word vectors under either of its names, or under both."""
    tables = [found[name].read() for name in (SHARED, EMBED) if name in found]
    if len(tables) == 2 and not torch.equal(*tables):
        limit = f"{SHARED} and {EMBED} must be one table, but differ"
        raise refuse(FIELD, str(path), limit, REMEDY)
    return {SHARED if name == EMBED else name: tensor for name, tensor in found.items()}


def _sizes(found: Mapping[str, Stored], path: Path, file_name: Callable[[str], str]) -> dict[str, Any]:
    """The configuration that the shapes of a file speak of."""

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


def _check_table(model: Any, path: Path) -> None:
    """Refuse an empty table: some releases of transformers leave one, and the video then ignores the prompt."""
    used, named = model.encoder.embed_tokens.weight, model.shared.weight
    assert torch.equal(used, named), "both names of the word vectors must be one table"
    if not used.any():
        raise refuse(FIELD, str(path), "its word vectors are all zero", REMEDY)
