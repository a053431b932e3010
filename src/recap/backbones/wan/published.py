"""Which public files each Wan row needs, where they lie on this machine, and how they come there.

A file lies at `<weights folder>/wan/<repository>/<its name there>`, a plain file in a known place: whoever has no
network can put it there by hand, and it is found without any hub library. Sizes and hashes are those of the files
these tables were written for. The 5.7 GB of the base transformer are never fetched: causal checkpoints replace it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recap.errors import refuse, unknown_name
from recap.io.fetch import check_hashes, check_room, download, size_text
from recap.io.files import sha256_of, weights_folder
from recap.io.report import Reporter


@dataclass(frozen=True, slots=True)
class PublicFile:
    """One file of a repository on the Hugging Face hub."""

    repository: str
    name: str
    size: int
    sha256: str | None = None
    exact: bool = True  # whether the size is known to the byte

    @property
    def path(self) -> Path:
        """Where it lies on this machine, fetched or not."""
        return weights_folder() / "wan" / self.repository / self.name

    def is_there(self) -> bool:
        """Whether a file of the right size is in its place."""
        path = self.path
        return path.is_file() and (not self.exact or path.stat().st_size == self.size)

    def __str__(self) -> str:
        return f"{self.repository}/{self.name}, {'' if self.exact else 'about '}{size_text(self.size)}"


BASE = "Wan-AI/Wan2.1-T2V-1.3B"
TEXT_ENCODER = PublicFile(BASE, "models_t5_umt5-xxl-enc-bf16.pth", 11_361_920_418)
AUTOENCODER = PublicFile(BASE, "Wan2.1_VAE.pth", 507_609_880)
TOKENIZER = (
    PublicFile(BASE, "google/umt5-xxl/spiece.model", 4_548_313),
    PublicFile(BASE, "google/umt5-xxl/tokenizer.json", 16_837_417),
    PublicFile(BASE, "google/umt5-xxl/tokenizer_config.json", 61_728),
    PublicFile(BASE, "google/umt5-xxl/special_tokens_map.json", 6_623),
)
SHARED = (TEXT_ENCODER, AUTOENCODER, *TOKENIZER)
BASE_LICENCE = f"{BASE} (text encoder, tokenizer, autoencoder): Apache-2.0 by its model card"

TINY_DECODER = ("taew2_1.safetensors", "taew2_1.pth")
"""Names under which the small decoder of madebyollin/taehv (MIT, 22 MB) may be put into `<weights folder>/wan`."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """What one row needs in addition to the shared files."""

    checkpoint: PublicFile
    # Which weights of the checkpoint its authors generate with; None: the averaged if it has them.
    ema: bool | None
    licence: str
    lora: PublicFile | None = None
    lora_alpha: float | None = None  # of its authors' config; the file does not contain it

    @property
    def files(self) -> tuple[PublicFile, ...]:
        return (self.checkpoint, *((self.lora,) if self.lora else ()), *SHARED)


NON_COMMERCIAL = "CC-BY-NC-SA-4.0 by its model card: no commercial use"

SETS = {
    "self-forcing": WeightSet(
        checkpoint=PublicFile(
            "gdhe17/Self-Forcing",
            "checkpoints/self_forcing_dmd.pt",
            5_676_252_553,
            "a0413986d9734e02c09504e1520f5697ba6df731bb2f0f35577485e9cc8f56a3",
        ),
        ema=True,
        licence=f"gdhe17/Self-Forcing: {NON_COMMERCIAL}",
    ),
    "infinite-forcing": WeightSet(
        checkpoint=PublicFile("SOTAMak1r/Infinite-Forcing", "ema_model.pt", 5_676_000_000, exact=False),
        ema=None,
        licence="SOTAMak1r/Infinite-Forcing: no licence is known for the weights (its code is Apache-2.0)",
    ),
    "longlive": WeightSet(
        checkpoint=PublicFile(
            "Efficient-Large-Model/LongLive-1.3B",
            "models/longlive_base.pt",
            5_676_334_208,
            "10a2aa8fcf89c77d9033f4c117405412a690e289625766619d293f0c5a208ee7",
        ),
        ema=False,
        licence=f"Efficient-Large-Model/LongLive-1.3B: {NON_COMMERCIAL}",
        lora=PublicFile(
            "Efficient-Large-Model/LongLive-1.3B",
            "models/lora.pt",
            2_800_056_690,
            "c4e43b87d62d4b0614b496773639f1ab170a7ee486dc23407901e9d3a5ebc07a",
        ),
        lora_alpha=256.0,
    ),
}


@dataclass(frozen=True, slots=True)
class WanFiles:
    """The installed files of one row, for loaders."""

    checkpoint: Path
    ema: bool | None
    lora: Path | None
    lora_alpha: float | None
    text_encoder: Path
    tokenizer: Path  # a folder
    autoencoder: Path
    tiny_decoder: Path | None  # optional, put there by hand


def find_weights(name: str) -> WanFiles:
    """The files of a row, all there and of the right size, or an error with the command that fetches them."""
    chosen = _set(name)
    absent = [file for file in chosen.files if not file.is_there()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        limit = f"{absent[0].path}{more} is not there or not whole"
        raise refuse("weights", name, limit, f"`recap weights {name}` fetches what is missing")
    by_hand = (weights_folder() / "wan" / name for name in TINY_DECODER)
    return WanFiles(
        checkpoint=chosen.checkpoint.path,
        ema=chosen.ema,
        lora=chosen.lora.path if chosen.lora else None,
        lora_alpha=chosen.lora_alpha,
        text_encoder=TEXT_ENCODER.path,
        tokenizer=TOKENIZER[0].path.parent,
        autoencoder=AUTOENCODER.path,
        tiny_decoder=next((path for path in by_hand if path.is_file()), None),
    )


def published_lora_alpha(file: Path) -> float | None:
    """The alpha its authors merge a published LoRA with, wherever a copy lies; of other files nothing is known."""
    for known in SETS.values():
        # Equal sizes are no proof: another training run writes files of the same layout.
        same_size = known.lora is not None and file.stat().st_size == known.lora.size
        if known.lora and same_size and sha256_of(file, lambda size: None) == known.lora.sha256:
            return known.lora_alpha
    return None


def fetch_weights(name: str, *, dry_run: bool, reporter: Reporter) -> WanFiles | None:
    """Report licences and plan, then fetch what is missing and check all of it; a dry run ends with the plan."""
    chosen = _set(name)
    missing = [file for file in chosen.files if not file.is_there()]
    for line in _plan(name, chosen, missing):
        reporter.notice(line)
    # The hub's library resumes these.
    begun = (weights_folder() / "wan").rglob("*.incomplete")
    check_room(name, sum(file.size for file in missing) - sum(part.stat().st_size for part in begun))
    if dry_run:
        return None
    for file in missing:
        reporter.notice(f"fetching {file}")
        _download(file)
    check_hashes({file.path: file.sha256 for file in chosen.files if file.sha256}, reporter)
    return find_weights(name)


def _set(name: str) -> WeightSet:
    if name not in SETS:
        raise unknown_name("weights", name, SETS)
    return SETS[name]


def _plan(name: str, chosen: WeightSet, missing: list[PublicFile]) -> list[str]:
    folder = weights_folder() / "wan"
    to_fetch = size_text(sum(file.size for file in missing)) if missing else "nothing"
    return [
        f"licence: {chosen.licence}",
        f"licence: {BASE_LICENCE}",
        *(f"{'fetch' if file in missing else 'have '} {file}" for file in chosen.files),
        f"{name}: {to_fetch} to fetch, to {folder}",
        f"optional, by hand: {TINY_DECODER[0]} (or .pth) of madebyollin/taehv, MIT, 22 MB, to {folder}",
    ]


def _download(file: PublicFile) -> None:
    # One of another size would be taken by the hub's library for the file it fetched once.
    file.path.unlink(missing_ok=True)
    folder = weights_folder() / "wan" / file.repository
    download(file.repository, folder, file.name, str(file), f"put the file there yourself: {file.path}")
    if not file.is_there():
        found = file.path.stat().st_size if file.path.is_file() else 0
        limit = f"the hub gave {found} bytes, not the {file.size} of the file this version was written for"
        raise refuse("weights", str(file), limit, "look for a newer version of recap")
