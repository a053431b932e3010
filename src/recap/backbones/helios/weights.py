"""Which parts of the public Helios repositories are fetched, where they lie, and whether they are whole.

A repository in diffusers' layout comes as it is, to `<weights folder>/helios/<repository>`, without the folders of
earlier training stages that nothing reads. Whoever has no network puts the same folders there by hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from recap.backbones.helios.spec import ROWS
from recap.backbones.wan.tensors import shards
from recap.errors import refuse, unknown_name
from recap.io.files import weights_folder

Report = Callable[[str], None]

PARTS = ("transformer", "text_encoder", "tokenizer", "vae", "scheduler")
WEIGHED = ("transformer", "text_encoder", "vae")
SKIPPED = {"helios-base": "transformer_init", "helios-distilled": "transformer_ode"}
ABOUT_GB = 75
"""Of one repository without what is skipped; by others' reports, the files have not been at hand."""
LICENCE = "Apache-2.0 by the code's repository (PKU-YuanGroup/Helios); see the model card for the weights"
EXTRA = "pip install recap-forcing[wan]"


def helios_folder(name: str) -> Path:
    """Where a row's repository lies on this machine, fetched or not."""
    if name not in ROWS:
        raise unknown_name("weights", name, ROWS)
    return weights_folder() / "helios" / ROWS[name].repository


def check_folder(folder: Path, field: str, remedy: str, *, text: bool = True) -> Path:
    """The folder, if all parts are in it and every file that an index names is there; `text` to be encoded or not."""
    unread = () if text else ("text_encoder", "tokenizer")
    for part in PARTS:
        if part not in unread and not (folder / part).is_dir():
            raise refuse(field, str(folder), f"it has no {part}/", remedy)
    for part in set(WEIGHED).difference(unread):
        for file in shards(folder / part, field):
            if not file.is_file():
                raise refuse(field, str(file), "its index names it, and it is not there", remedy)
    return folder


def find_helios_weights(name: str, *, text: bool = True) -> Path:
    """The folder of a row, whole, or an error with the command that fetches it."""
    remedy = f"`recap weights {name}` fetches what is missing"
    return check_folder(helios_folder(name), "weights", remedy, text=text)


def fetch_helios_weights(name: str, *, dry_run: bool, report: Report) -> Path | None:
    """Print licence and plan, then fetch what is missing; a dry run ends with the plan."""
    folder, row = helios_folder(name), ROWS[name]
    report(f"licence: {LICENCE}")
    report(f"fetch {row.repository}: {', '.join(f'{part}/' for part in PARTS)}, about {ABOUT_GB} GB in all")
    if name in SKIPPED:
        report(f"skip  {row.repository}/{SKIPPED[name]}/, an earlier stage of training that nothing reads")
    report(f"{name}: to {folder}")
    _check_room(name, folder)
    if dry_run:
        return None
    _download(row.repository, folder)
    return find_helios_weights(name)


def _check_room(name: str, folder: Path) -> None:
    home = weights_folder()
    there = next(parent for parent in (home, *home.absolute().parents) if parent.is_dir())
    have = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free, needed = shutil.disk_usage(there).free, ABOUT_GB * 10**9 - have
    if needed > free:
        limit = f"needs about {needed / 1e9:.0f} GB more, and {there} has {free / 1e9:.0f} GB free"
        raise refuse("weights", name, limit, "make room, or set RECAP_HOME to a folder on another disk")


def _download(repository: str, folder: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        limit = "huggingface_hub fetches it and is not installed"
        raise refuse("weights", repository, limit, f"`{EXTRA}` brings it") from error
    wanted = ["model_index.json", *(f"{part}/*" for part in PARTS)]
    try:
        snapshot_download(repository, allow_patterns=wanted, local_dir=folder)
    except Exception as error:  # the hub's own errors, those of its network library, and those of the disk
        said = str(error).strip().splitlines() or [type(error).__name__]
        remedy = f"try again, which goes on where it stopped, or put the folders into {folder} yourself"
        raise refuse("weights", repository, f"could not be fetched ({said[0]})", remedy) from error
