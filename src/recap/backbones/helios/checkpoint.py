"""This module finds, fetches and loads the public Helios repositories, which are in diffusers' layout.

A repository comes as it is, to `<weights folder>/helios/<repository>`, without the folders of earlier training stages
that nothing reads. Without a network, the same folders can be put there by hand. The transformer is not loaded by
diffusers, which needs accelerate for a model that keeps some layers in fp32; and the published files are fp32
throughout, 54 GB, which stay on the disk, mapped, while they are converted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recap.backbones.helios.spec import ROWS, HeliosSpec
from recap.backbones.wan.vae import load_config
from recap.errors import refuse
from recap.io.extras import import_extra
from recap.io.fetch import check_room, download
from recap.io.files import weights_folder
from recap.io.report import Reporter
from recap.io.weights import files_of, fill, open_tensors, without_storage

FIELD = "Helios transformer"
PARTS = ("transformer", "text_encoder", "tokenizer", "vae", "scheduler")
WEIGHED = ("transformer", "text_encoder", "vae")
SKIPPED = {"helios-base": "transformer_init", "helios-distilled": "transformer_ode"}
# Size of one repository without what is skipped, as reported by others; not verified.
ABOUT_GB = 75
LICENCE = "Apache-2.0 by the code's repository (PKU-YuanGroup/Helios); see the model card for the weights"


def check_folder(folder: Path, field: str, remedy: str, *, text: bool = True) -> Path:
    """Refuse a folder that lacks a part or a file that an index names; without `text` no text encoder is needed."""
    unread = () if text else ("text_encoder", "tokenizer")
    for part in PARTS:
        if part not in unread and not (folder / part).is_dir():
            raise refuse(field, str(folder), f"it has no {part}/", remedy)
    for part in set(WEIGHED).difference(unread):
        files_of(folder / part, field, remedy)
    return folder


def find_helios_weights(row: HeliosSpec, *, text: bool = True) -> Path:
    """Return the folder of a model, or refuse one that is not whole with the command that fetches it."""
    folder = weights_folder() / "helios" / row.repository
    return check_folder(folder, "weights", f"`recap weights {row.name}` fetches what is missing", text=text)


def fetch_helios_weights(name: str, *, dry_run: bool, reporter: Reporter) -> Path | None:
    """Report licence and plan, then fetch what is missing; a dry run ends with the plan."""
    repository = ROWS[name].repository
    folder = weights_folder() / "helios" / repository
    reporter.notice(f"licence: {LICENCE}")
    parts = ", ".join(f"{part}/" for part in PARTS)
    reporter.notice(f"fetch {repository}: {parts}, about {ABOUT_GB} GB in all")
    if name in SKIPPED:
        skipped = f"{repository}/{SKIPPED[name]}/"
        reporter.notice(f"skip  {skipped}, an earlier stage of training that nothing reads")
    reporter.notice(f"{name}: to {folder}")
    present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    check_room(name, ABOUT_GB * 10**9 - present, "about ")
    if dry_run:
        return None
    wanted = ["model_index.json", *(f"{part}/*" for part in PARTS)]
    download(repository, folder, wanted, name, f"put the folders into {folder} yourself")
    return find_helios_weights(ROWS[name])


def empty_transformer(folder: Path) -> Any:
    """Return the model of a folder's config, without storage."""
    kind = import_extra("diffusers", "Helios", "helios").HeliosTransformer3DModel
    config = load_config(kind, folder, FIELD)
    with without_storage():
        return kind.from_config(config)


def load_transformer(folder: Path, spec: HeliosSpec, dtype: torch.dtype) -> Any:
    """Return the transformer on the CPU, filled strictly, tensor by tensor, in the precision it runs in."""
    model = empty_transformer(folder)
    config = model.config
    sizes = (len(model.blocks), config.num_attention_heads, config.attention_head_dim, config.text_dim)
    if sizes != (spec.layers, spec.heads, spec.head_dim, spec.text_dim):
        limit = f"its layers, heads, channels of a head and of text are not those of {spec.name}"
        raise refuse(FIELD, sizes, limit, f"pass the folder of {spec.repository}, not {folder}")
    whole = set(model._keep_in_fp32_modules)

    def precision(name: str) -> torch.dtype:
        return torch.float32 if whole.intersection(name.split(".")) else dtype

    found = open_tensors(folder, FIELD)
    fill(model, found, path=folder, field=FIELD, dtype=precision, what=spec.name, copy=False)
    # Its frequencies are in no file, and were made without storage.
    model.rope = type(model.rope)(rope_dim=config.rope_dim, theta=config.rope_theta)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model
