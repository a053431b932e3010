"""Which parts of the public Helios repositories are fetched, where they lie, and whether they are whole.

A repository in diffusers' layout comes as it is, to `<weights folder>/helios/<repository>`, without the folders of
earlier training stages that nothing reads. Whoever has no network puts the same folders there by hand.
"""

from __future__ import annotations

from pathlib import Path

from recap.backbones.helios.spec import ROWS
from recap.errors import refuse, unknown_name
from recap.io.fetch import check_room, download
from recap.io.files import weights_folder
from recap.io.report import Reporter
from recap.io.weights import files_of

PARTS = ("transformer", "text_encoder", "tokenizer", "vae", "scheduler")
WEIGHED = ("transformer", "text_encoder", "vae")
SKIPPED = {"helios-base": "transformer_init", "helios-distilled": "transformer_ode"}
ABOUT_GB = 75
"""Size of one repository without what is skipped, as reported by others; not verified."""
LICENCE = "Apache-2.0 by the code's repository (PKU-YuanGroup/Helios); see the model card for the weights"


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
        files_of(folder / part, field, remedy)
    return folder


def find_helios_weights(name: str, *, text: bool = True) -> Path:
    """The folder of a row, whole, or an error with the command that fetches it."""
    remedy = f"`recap weights {name}` fetches what is missing"
    return check_folder(helios_folder(name), "weights", remedy, text=text)


def fetch_helios_weights(name: str, *, dry_run: bool, reporter: Reporter) -> Path | None:
    """Report licence and plan, then fetch what is missing; a dry run ends with the plan."""
    folder, repository = helios_folder(name), ROWS[name].repository
    reporter.notice(f"licence: {LICENCE}")
    parts = ", ".join(f"{part}/" for part in PARTS)
    reporter.notice(f"fetch {repository}: {parts}, about {ABOUT_GB} GB in all")
    if name in SKIPPED:
        reporter.notice(
            f"skip  {repository}/{SKIPPED[name]}/, an earlier stage of training that nothing reads"
        )
    reporter.notice(f"{name}: to {folder}")
    present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    check_room(name, ABOUT_GB * 10**9 - present, "about ")
    if dry_run:
        return None
    wanted = ["model_index.json", *(f"{part}/*" for part in PARTS)]
    download(repository, folder, wanted, name, f"put the folders into {folder} yourself")
    return find_helios_weights(name)
