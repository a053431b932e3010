"""Fits a run to its card before anything is loaded: `--low-memory`.

What a public Wan model takes of a card is planned, and what fits is chosen. Weights, keys and values are counted from
the sizes of the model. What kernels need temporarily, and what the driver and libraries take, is measured:
`python -m benchmarks.card`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import prod

import torch

from recap.backbones.wan.checkpoint import shapes_of
from recap.backbones.wan.family import AUTOENCODER_PARAMETERS, WanConfig
from recap.backbones.wan.published import TEXT_ENCODER
from recap.backbones.wan.spec import WanSpec
from recap.config import DTYPES, Choice, RunConfig
from recap.fast.vae import PUBLIC_WIDTH, FastVae, can_fuse
from recap.io.devices import free_on, has_room
from recap.io.report import Notice
from recap.io.weights import without_storage

# Parameters of the tiny decoder, and of RAFT-small.
TINY_PARAMETERS, FLOW_PARAMETERS = 9_844_611, 990_162
WORK = {"fast": {"full": 980.0, "tiny": 610.0}, "readable": {"full": 1010.0, "tiny": 305.0}}
"""Bytes that kernels need temporarily, per pixel of a block's pictures: of the decoder, mostly.

From what was reserved on an H200 (2026-11-17), less the parts that are counted; for the readable path from what was
allocated.
"""
UNFUSED = 190.0
"""What the fast path's full decoder needs more before Hopper, without kernels of its own: counted, not measured."""
# Smaller parts are not listed.
SHOWN = 5e6
DRIVER = 0.84e9
"""What a process takes of a card besides its tensors, on an H200 (2026-11-17): context, kernels, libraries."""
CONTEXT = 0.5e9
"""What of it is taken before free memory can be asked for: CUDA's context, which asking opens.

An estimate: only the sum was measured so far; `python -m benchmarks.card` measures both. On a smaller card both are
presumably smaller, by as much, so that what is still to come, kernels and libraries, is the same.
"""


@dataclass(frozen=True, slots=True)
class CardSetting:
    """Names what decides how much of a card a run takes, besides the model."""

    path: str = "fast"
    decoder: str = "full"
    precision: str = "full"

    def __str__(self) -> str:
        weights = "" if self.precision == "full" else f", {self.precision} weights"
        return f"{self.path} path, {self.decoder} decoder{weights}"


PATHS = ("fast", "readable")
REMEDIES: dict[str, dict[str, str]] = {
    "--decoder tiny": {"decoder": "tiny"},
    "--precision int8": {"precision": "int8"},
}
"""What a user may add. It changes what is generated, so it is never done unasked."""


@dataclass(frozen=True, slots=True)
class CardPlan:
    """Lists the parts of a setting, in bytes."""

    setting: CardSetting
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def fits(self, free: float) -> bool:
        """Tell whether it fits into the free bytes of a card; the context is there already and takes none of them."""
        return self.total - CONTEXT <= free


@dataclass(frozen=True, slots=True)
class Demand:
    """States what decides how much of a card a model takes, whatever the setting.

    `frames` counts the latent frames whose keys and values a block sees, its own among them; `fused` tells whether
    the decoder's own kernels run on the card.
    """

    spec: WanSpec
    frames: float
    rows: int = 1
    itemsize: int = 2
    fused: bool = True

    def plan(self, setting: CardSetting) -> CardPlan:
        """Return the size of every part in a setting."""
        spec, rows, fast = self.spec, self.rows, setting.path == "fast"
        frame = 2 * spec.layers * prod(spec.grid) * spec.dim * self.itemsize * rows
        text = 2 * spec.layers * spec.text_len * spec.dim * self.itemsize * rows
        weights, past = self._decoder(setting)
        side = spec.token_pixels // spec.patch[1]
        work = WORK[setting.path][setting.decoder]
        work += UNFUSED if fast and setting.decoder == "full" and not self.fused else 0.0
        pixels = rows * spec.frames_per_block * spec.pictures_per_frame * prod(spec.latent_size) * side**2
        parts = {
            "transformer": self._transformer(setting),
            "text": text * (2 if fast else 1),
            "memory": self.frames * frame,
            # All keys and values as a block reads them; the readable path's are gone while it decodes.
            "window": self.frames * frame * fast,
            "decoder": weights + past,
            "flow": 4.0 * FLOW_PARAMETERS,
            "work": work * pixels * self.itemsize / 2,
            "driver": DRIVER,
        }
        return CardPlan(setting, parts)

    def _transformer(self, setting: CardSetting) -> float:
        parameters = sum(shape.numel() for shape in shapes_of(self.spec).values())
        if setting.precision == "full":
            return float(parameters * self.itemsize)
        dim, ffn = self.spec.dim, self.spec.ffn_dim
        # Of every layer: eight projections of attention to itself and to the text, two of the feed-forward.
        eight_bit = self.spec.layers * (8 * dim**2 + 2 * dim * ffn)
        return float((parameters - eight_bit) * self.itemsize + eight_bit)

    def _decoder(self, setting: CardSetting) -> tuple[float, float]:
        """Return the bytes of weights and of what a stream of the decoder remembers."""
        size = (self.rows, *self.spec.latent_size)
        if setting.decoder == "tiny":
            return 2.0 * TINY_PARAMETERS, 0.0
        with without_storage():
            vae = FastVae(PUBLIC_WIDTH, self.spec.in_channels)
        past = self.itemsize * sum(prod(shape) for shape in vae.pasts(size))
        # The fast path has a decoder of its own next to the autoencoder.
        own = sum(p.numel() for p in vae.parameters()) if setting.path == "fast" else 0
        return float(self.itemsize * (AUTOENCODER_PARAMETERS + own)), float(past)


def choose(demand: Demand, asked: CardSetting, low_memory: str, free: float) -> CardPlan:
    """Return the plan of the best setting that fits into `free` bytes, or of the smallest if none does.

    Only settings that differ in rounding are chosen between. `low_memory` is what `--low-memory` says.
    """
    paths = (asked.path,) if low_memory == "off" else PATHS[PATHS.index(asked.path) :]
    plans = [demand.plan(replace(asked, path=path)) for path in paths]
    fitting = [plan for plan in plans if plan.fits(free) and low_memory != "on"]
    return fitting[0] if fitting else min(plans, key=lambda plan: plan.total)


def what_to_add(
    demand: Demand, asked: CardSetting, low_memory: str, free: float
) -> tuple[str, CardPlan] | None:
    """Return the fewest further options with which a run fits, and its plan then; None where none help."""
    every = (combinations(REMEDIES, count + 1) for count in range(len(REMEDIES)))
    for options in chain.from_iterable(every):
        changes = {name: value for option in options for name, value in REMEDIES[option].items()}
        if any(getattr(asked, name) != "full" for name in changes):
            continue
        plan = choose(demand, replace(asked, **changes), low_memory, free)
        if plan.fits(free):
            return " ".join(options), plan
    return None


def describe_plan(demand: Demand, setting: CardSetting, low_memory: str, free: float | None) -> list[str]:
    """Return lines for the user: what is needed, whether it fits into the free bytes, and what to add if not."""
    plan = demand.plan(setting)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in plan.parts.items() if size >= SHOWN)
    lines = [f"memory: {setting}: about {plan.total / 1e9:.1f} GB ({parts})"]
    if free is None:
        return lines
    if plan.fits(free):
        return [*lines, f"memory: fits into {_describe_room(free)}"]
    # Whatever another path was chosen for may be gone with another decoder.
    asked = replace(setting, path="fast") if low_memory == "auto" else setting
    found = what_to_add(demand, asked, low_memory, free)
    if found is None:
        remedy = "no option makes it fit, so close other programs or use a larger card"
    else:
        remedy = f"fits with {found[0]} ({found[1].setting}: about {found[1].total / 1e9:.1f} GB)"
    return [*lines, f"memory: that is more than {_describe_room(free)}; {remedy}"]


def _describe_room(free: float) -> str:
    return f"the {free / 1e9:.1f} GB that are free and the {CONTEXT / 1e9:.1f} GB that CUDA has taken already"


def fit_card(config: RunConfig, notice: Notice, *, random_weights: bool = False) -> RunConfig:
    """Return the config with whatever its `low_memory` means on this card: the path, and where text is encoded.

    A model that is not installed is refused first, unless its weights are random.
    """
    demand, free = _demand(config, random_weights), free_on(config.device)
    if demand is None or free is None or config.low_memory == "off":
        return config
    asked = _setting(config)
    path = choose(demand, asked, config.low_memory, free).setting.path
    if path != asked.path:
        needs = f"{demand.plan(asked).total / 1e9:.1f} GB"
        reason = f"the {asked.path} one takes {needs}, and there are {_describe_room(free)}"
        notice(f"memory: the {path} path is used: {reason}")
        config = replace(config, eager=True)
    settings = config.backbone.settings
    if config.low_memory == "on" and isinstance(settings, WanConfig) and not settings.text_device:
        config = replace(config, backbone=Choice(config.backbone.name, replace(settings, text_device="cpu")))
    return config


def describe_fit(config: RunConfig, *, random_weights: bool = False) -> list[str]:
    """Return lines about the memory that a run needs, with what to add where its card is too small."""
    demand = _demand(config, random_weights)
    if demand is None:
        return []
    lines = describe_plan(demand, _setting(config), config.low_memory, free_on(config.device))
    settings = config.backbone.settings
    if random_weights or not isinstance(settings, WanConfig) or settings.prompt_embeds:
        return lines
    return [*lines, _describe_text(settings.text_device or config.device)]


def _describe_text(device: str) -> str:
    """Return a line about the text encoder, which is freed before the model is read."""
    where, free = device, free_on(device)
    if free is not None and not has_room(TEXT_ENCODER.size, free):
        where = f"the CPU, since it does not fit into the {free / 1e9:.1f} GB that are free on {device}"
    needs = f"about {TEXT_ENCODER.size / 1e9:.1f} GB"
    return f"memory: before that, for prompts not encoded before, the text encoder alone: {needs} on {where}"


def _demand(config: RunConfig, random_weights: bool) -> Demand | None:
    """Return what the run's model takes; None where it is not planned: other families, or two devices."""
    settings = config.backbone.settings
    if not isinstance(settings, WanConfig) or config.decoder_device:
        return None
    if not random_weights:
        settings.check_files()
    spec = settings.spec
    frames = max(config.memory.settings.attended_frames(spec.backbone_spec()))
    dtype = DTYPES[config.dtype]
    fused = can_fuse(torch.device(config.device), dtype)
    return Demand(spec, frames, len(config.seeds), dtype.itemsize, fused=fused)


def _setting(config: RunConfig) -> CardSetting:
    settings = config.backbone.settings
    assert isinstance(settings, WanConfig)
    fast = config.device.startswith("cuda") and not config.eager
    return CardSetting("fast" if fast else "readable", settings.decoder, config.precision)
