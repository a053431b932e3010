"""A tokenizer and a text encoder of the real kinds, at the size of a thumbnail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import UMT5Config, UMT5EncoderModel

from recap.backbones.text import wan_name

TEXT_LEN, TEXT_DIM = 12, 16

CORPUS = """a red fox walks on a beach by day and a boat sails on the sea
the fox leaves; a house stands on a hill, and a whale swims under the boat
café & crème: two cats and one dog, a small dog -- a large cat"""


def make_tokenizer(folder: Path) -> Path:
    """A sentencepiece tokenizer in the layout and with the special tokens of `google/umt5-xxl`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text(CORPUS)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=70,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 0}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", **special}))
    return folder


def make_encoder() -> Any:
    """Three layers, three heads of 6 channels (not TEXT_DIM / 3), every tensor random."""
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=80,
        d_model=TEXT_DIM,
        d_kv=6,
        d_ff=24,
        num_layers=3,
        num_heads=3,
        feed_forward_proj="gated-gelu",
    )
    model = UMT5EncoderModel(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.4 + float("norm" in name))
    return model


def wan_tensors(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors as Wan's own file has them."""
    return {wan_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
