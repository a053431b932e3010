"""This module knows which public files each Wan model needs, where they lie on this machine, and how to fetch them.

A file lies at `<weights folder>/wan/<repository>/<its name there>`, a plain file in a known place: without a
network it can be put there by hand, and it is found without any hub library. Sizes and hashes are those of the files
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
    """Describes one file of a repository on the Hugging Face hub."""

    repository: str
    name: str
    size: int
    sha256: str | None = None
    # Whether the size is known to the byte.
    exact: bool = True

    @property
    def path(self) -> Path:
        """Return the file's place on this machine, whether it is there or not."""
        return weights_folder() / "wan" / self.repository / self.name

    def is_there(self) -> bool:
        """Return whether a file of the right size is in its place."""
        path = self.path
        return path.is_file() and (not self.exact or path.stat().st_size == self.size)

    def fetch(self) -> None:
        """Download the file, replacing one of another size."""
        # The hub's library would take that for the file it fetched once.
        self.path.unlink(missing_ok=True)
        folder = weights_folder() / "wan" / self.repository
        download(self.repository, folder, self.name, str(self), f"put the file there yourself: {self.path}")
        if not self.is_there():
            found = self.path.stat().st_size if self.path.is_file() else 0
            limit = f"the hub sent {found} bytes, and this version was written for a file of {self.size}"
            raise refuse("weights", str(self), limit, "look for a newer version of recap")

    def __str__(self) -> str:
        return f"{self.repository}/{self.name}, {'' if self.exact else 'about '}{size_text(self.size)}"


BASE = "Wan-AI/Wan2.1-T2V-1.3B"
BASE_LICENCE = f"{BASE} (text encoder, tokenizer, autoencoder): Apache-2.0 by its model card"
TEXT_ENCODER = PublicFile(BASE, "models_t5_umt5-xxl-enc-bf16.pth", 11_361_920_418)
AUTOENCODER = PublicFile(BASE, "Wan2.1_VAE.pth", 507_609_880)
TOKENIZER = (
    PublicFile(BASE, "google/umt5-xxl/spiece.model", 4_548_313),
    PublicFile(BASE, "google/umt5-xxl/tokenizer.json", 16_837_417),
    PublicFile(BASE, "google/umt5-xxl/tokenizer_config.json", 61_728),
    PublicFile(BASE, "google/umt5-xxl/special_tokens_map.json", 6_623),
)

TINY_DECODER = ("taew2_1.safetensors", "taew2_1.pth")
"""The small decoder of madebyollin/taehv (MIT, 22 MB) may be put into `<weights folder>/wan` under these names."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Lists the files of one model, with the settings that its authors use them with."""

    checkpoint: PublicFile
    # Which weights of the checkpoint its authors generate with; None: the averaged ones if it has them.
    ema: bool | None
    licence: str
    lora: PublicFile | None = None
    # From the authors' config; the file does not contain it.
    lora_alpha: float | None = None
    text_encoder: PublicFile = TEXT_ENCODER
    autoencoder: PublicFile = AUTOENCODER
    tokenizer: tuple[PublicFile, ...] = TOKENIZER

    @property
    def files(self) -> tuple[PublicFile, ...]:
        lora = () if self.lora is None else (self.lora,)
        return (self.checkpoint, *lora, self.text_encoder, self.autoencoder, *self.tokenizer)


NON_COMMERCIAL = "CC-BY-NC-SA-4.0 by its model card: no commercial use"
SELF_FORCING = "gdhe17/Self-Forcing"
INFINITE_FORCING = "SOTAMak1r/Infinite-Forcing"
LONGLIVE = "Efficient-Large-Model/LongLive-1.3B"
CAUSAL_FORCING = "zhuhz22/Causal-Forcing"
UNKNOWN_LICENCE = f"{CAUSAL_FORCING}: the licence of the weights was not looked up; see the model card"


def _causal_forcing(file: str) -> WeightSet:
    # The size is that of one set of weights in fp32, as in Self-Forcing's file.
    checkpoint = PublicFile(CAUSAL_FORCING, file, 5_676_000_000, exact=False)
    return WeightSet(checkpoint, ema=None, licence=UNKNOWN_LICENCE)


SETS = {
    "self-forcing": WeightSet(
        checkpoint=PublicFile(
            SELF_FORCING,
            "checkpoints/self_forcing_dmd.pt",
            5_676_252_553,
            "a0413986d9734e02c09504e1520f5697ba6df731bb2f0f35577485e9cc8f56a3",
        ),
        ema=True,
        licence=f"{SELF_FORCING}: {NON_COMMERCIAL}",
    ),
    "infinite-forcing": WeightSet(
        checkpoint=PublicFile(INFINITE_FORCING, "ema_model.pt", 5_676_000_000, exact=False),
        ema=None,
        licence=f"{INFINITE_FORCING}: no licence is known for the weights (its code is Apache-2.0)",
    ),
    "longlive": WeightSet(
        checkpoint=PublicFile(
            LONGLIVE,
            "models/longlive_base.pt",
            5_676_334_208,
            "10a2aa8fcf89c77d9033f4c117405412a690e289625766619d293f0c5a208ee7",
        ),
        ema=False,
        licence=f"{LONGLIVE}: {NON_COMMERCIAL}",
        lora=PublicFile(
            LONGLIVE,
            "models/lora.pt",
            2_800_056_690,
            "c4e43b87d62d4b0614b496773639f1ab170a7ee486dc23407901e9d3a5ebc07a",
        ),
        lora_alpha=256.0,
    ),
    # Unlike the names of the other two, this one is not confirmed: the hub could not be reached from here.
    "causal-forcing": _causal_forcing("chunkwise/causal_forcing.pt"),
    "causal-forcing-2step": _causal_forcing("causal-forcing++/framewise-2step.pt"),
    "causal-forcing-1step": _causal_forcing("causal-forcing++/framewise-1step.pt"),
}


def find_weights(name: str) -> WeightSet:
    """Return the files of a model, all there and of the right size, or refuse with the command that fetches them."""
    chosen = _set(name)
    absent = [file for file in chosen.files if not file.is_there()]
    if absent:
        more = len(absent) - 1
        others = {0: "", 1: ", and so is 1 other file"}.get(more, f", and so are {more} other files")
        limit = f"{absent[0].path} is missing or incomplete{others}"
        raise refuse("weights", name, limit, f"`recap weights {name}` fetches what is missing")
    return chosen


def find_tiny_decoder() -> Path | None:
    """Return the small decoder that somebody put into the weights folder, if there is one."""
    paths = (weights_folder() / "wan" / name for name in TINY_DECODER)
    return next((path for path in paths if path.is_file()), None)


def published_lora_alpha(file: Path) -> float | None:
    """Return the alpha with which its authors merge a published LoRA, wherever a copy of it lies."""
    for known in SETS.values():
        # Equal sizes are no proof: another training run writes files of the same layout.
        same_size = known.lora is not None and file.stat().st_size == known.lora.size
        if known.lora and same_size and sha256_of(file, lambda size: None) == known.lora.sha256:
            return known.lora_alpha
    return None


def fetch_weights(name: str, *, dry_run: bool, reporter: Reporter) -> Path | None:
    """Report licences and plan, then fetch what is missing, check all of it, and return the checkpoint.

    A dry run ends with the plan.
    """
    chosen, folder = _set(name), weights_folder() / "wan"
    missing = [file for file in chosen.files if not file.is_there()]
    to_fetch = size_text(sum(file.size for file in missing)) if missing else "nothing"
    for line in (
        f"licence: {chosen.licence}",
        f"licence: {BASE_LICENCE}",
        *(f"{'fetch' if file in missing else 'have '} {file}" for file in chosen.files),
        f"{name}: {to_fetch} to fetch, to {folder}",
        f"optional, by hand: {TINY_DECODER[0]} (or .pth) of madebyollin/taehv, MIT, 22 MB, to {folder}",
    ):
        reporter.notice(line)
    # The hub's library resumes these.
    begun = folder.rglob("*.incomplete")
    check_room(name, sum(file.size for file in missing) - sum(part.stat().st_size for part in begun))
    if dry_run:
        return None
    for file in missing:
        reporter.notice(f"fetching {file}")
        file.fetch()
    check_hashes({file.path: file.sha256 for file in chosen.files if file.sha256}, reporter)
    return find_weights(name).checkpoint.path


def _set(name: str) -> WeightSet:
    if name not in SETS:
        raise unknown_name("weights", name, SETS)
    return SETS[name]
