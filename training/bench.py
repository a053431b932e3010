"""The bench on which the embedded backbone is measured: models, judge, world, prompts, batches and a clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.tiny.autoencoder import Autoencoder, StreamingDecoder
from recap.backbones.tiny.backbone import WordTable, has_slots
from recap.backbones.tiny.vocabulary import ACTORS, SCENES, TIMES, Prompt, null_token_ids, prompt_text
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.schedule import warp
from recap.backbones.wan.spec import EMBEDDED, NUM_TRAIN_STEPS
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.eval.judges.probe import Probe
from recap.flow.classical import ClassicalFlow
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.plan import Plan, Shot, make_plan
from recap.rollout import Resume, rollout
from recap.types import GeneratedBlock
from training.measures import (
    RowsDecoder,
    Series,
    watch,
)
from training.records import load_weights
from training.sampling import MANY_STEPS, EulerBackbone
from training.script import Script
from training.world import Clips, World

T = TypeVar("T")
B = TypeVar("B", bound=WanBackbone)

SEED = 20_000_000  # past every seed that training and its own evaluations draw from
KEPT = (
    15.0  # Delta E under which an instance counts as the same; two instances of one kind lie about 40 apart
)
MEMORIES: dict[str, Any] = {
    "none": NoMemoryConfig(),
    "sink": SinkConfig(),
    "sink, lambda 5": SinkConfig(reinforcement=5.0),
    "recap, lambda 1": RecapConfig(reinforcement=1.0),
    "recap, lambda 3": RecapConfig(reinforcement=3.0),
    "recap, lambda 5": RecapConfig(reinforcement=5.0),
}
PAIRS = (
    ("sink", "none"), ("sink, lambda 5", "sink"), ("recap, lambda 1", "sink"), ("recap, lambda 3", "sink"),
    ("recap, lambda 5", "sink"), ("recap, lambda 5", "sink, lambda 5"),
)  # fmt: skip
LOOKUP_VISITS = {"in the opening": ((0, 37), (69, None)), "after it": ((9, 37), (69, None))}
"""Pictures on stage: gone for 2 s, back where block 6 begins; the sink saw it, or only a bank can have."""
LOOKUP_TOLD, LOOKUP_DRAWN = 6, 2  # blocks
SEGMENTS = (("A", 3.0, False), ("B", 6.0, True), ("C", 7.5, False), ("D", 7.5, True))
SETTLING_S = 1.0  # skipped after every cut


@dataclass(frozen=True, slots=True)
class Options:
    """What decides the numbers; None takes the part's own."""

    prompts: int | None = None
    repeats: int = 2  # seeds of each prompt, in the parts that compare memories
    seconds: float | None = None
    rows: int = 50
    seed: int = SEED
    memories: tuple[str, ...] = tuple(MEMORIES)
    cycle_threshold_px: float = FlowNoveltyConfig().cycle_threshold_px
    dtype: str = "float32"
    flow: str = "classical"
    device: str = "cpu"


class Case(NamedTuple):
    """One rollout to be drawn: a subject, with and without it, and its noise."""

    prompt: str
    empty: str
    actor: str
    seed: int
    cluster: int


def make_prompts(num: int, seed: int, actors: int = 1) -> list[Prompt]:
    """Different prompts by chance, the first actors of which go through the whole cast in turns."""
    most = len(ACTORS) * len(SCENES) * len(TIMES)
    if num > most:
        raise refuse("--prompts", num, f"at most {most} differ", "take more --repeats instead")
    dice = random.Random(seed * 10 + actors)
    made: dict[Prompt, None] = {}
    while len(made) < num:
        first = ACTORS[len(made) % len(ACTORS)]
        others = dice.sample([actor for actor in ACTORS if actor != first], actors - 1)
        made[Prompt((first, *others), dice.choice(SCENES), dice.choice(TIMES))] = None
    return list(made)


def make_cases(num_prompts: int, repeats: int, seed: int) -> list[Case]:
    """Every prompt of one actor with several seeds, prompt by prompt."""
    return [
        Case(prompt_text(p), prompt_text(Prompt((), p.scene, p.time)), p.actors[0], seed + i * repeats + k, i)
        for i, p in enumerate(make_prompts(num_prompts, seed))
        for k in range(repeats)
    ]


class Models(NamedTuple):
    four: WanBackbone  # as shipped
    many: EulerBackbone  # its teacher, where there is one: a distilled model is no flow any more
    autoencoder: Autoencoder


def load_models(
    folder: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    teacher: Path | None = None,
    guidance: float = 1.0,
) -> Models:
    """The models of a folder, whole files or parts; the autoencoder stays in fp32."""
    autoencoder = Autoencoder()
    autoencoder.load_state_dict(load_weights(folder / "autoencoder.safetensors"))
    autoencoder.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]
    four = join_parts(WanBackbone, *_load_drawer(folder, device, dtype), autoencoder)
    model, text = _load_drawer(teacher or folder, device, dtype)
    return Models(four, join_many(model, text, autoencoder, guidance), autoencoder)


def _load_drawer(folder: Path, device: str, dtype: torch.dtype) -> tuple[CausalWan, WordTable]:
    model, text = CausalWan(EMBEDDED), WordTable(slots=has_slots(folder / "text.safetensors"))
    model.load_state_dict(load_weights(folder / "dit.safetensors"))
    text.load_state_dict(load_weights(folder / "text.safetensors"))
    return model.to(device, dtype).requires_grad_(False), text.to(device).requires_grad_(False)


def join_parts(kind: type[B], model: CausalWan, text: WordTable, autoencoder: Autoencoder) -> B:
    return kind(model, text.encode, lambda: StreamingDecoder(autoencoder))


def join_many(
    model: CausalWan, text: WordTable, autoencoder: Autoencoder, guidance: float = 1.0
) -> EulerBackbone:
    """The model by many Euler steps."""
    many = join_parts(EulerBackbone, model, text, autoencoder)
    places = tuple(round(NUM_TRAIN_STEPS * (1 - i / MANY_STEPS)) for i in range(MANY_STEPS))
    many._sigmas = warp(places, model.spec.shift)
    if guidance != 1:
        many.guidance = guidance
        many.no_text = text(torch.tensor([null_token_ids()], device=text.words.weight.device))
    return many


class Bench:
    """The models under test, the judge, the world, and a clock."""

    def __init__(
        self, options: Options, models: Models, probe: Probe | None = None, world: World | None = None,
        open_flow: Callable[[], FlowEstimator] = ClassicalFlow, minutes: float = math.inf,
    ) -> None:  # fmt: skip
        self.options, self.models, self._open_flow = options, models, open_flow
        self._probe, self._world = probe, world
        self.spec = models.four.spec
        self.device = models.four.model.device
        self._began, self._ends = time.monotonic(), 60 * minutes
        self._long: dict[tuple[str, int], Series] = {}
        self._filmed: tuple[Any, tuple[Clips, Tensor]] | None = None

    @property
    def probe(self) -> Probe:
        if self._probe is None:
            raise refuse(
                "--probe", None, "this part needs the judge", "train it with python -m training.probe"
            )
        return self._probe

    @property
    def world(self) -> World:
        assert self._world is not None, "this part needs the world"
        return self._world

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def time_left(self, needed_s: float = 0.0) -> bool:
        return time.monotonic() - self._began + needed_s <= self._ends

    def count(self, usual: int) -> int:
        return usual if self.options.prompts is None else self.options.prompts

    def batches(self, num: int) -> list[slice]:
        """Slices of rows, whole prompts each."""
        step = max(1, self.options.rows // self.options.repeats) * self.options.repeats
        return [slice(start, min(start + step, num)) for start in range(0, num, step)]

    def sweep(
        self, cases: list[Case], draw: Callable[[str, slice], T], memories: Sequence[str]
    ) -> dict[str, list[T]]:
        """Draw batch after batch, all memories of one before the next, while there is time for another."""
        made: dict[str, list[T]] = {memory: [] for memory in memories}
        longest = 0.0
        for number, rows in enumerate(self.batches(len(cases))):
            begin = time.monotonic()
            if number and not self.time_left(longest):
                self.say(f"out of time: {rows.start} of {len(cases)} rollouts")
                break
            for memory in memories:
                made[memory].append(draw(memory, rows))
                self.say(f"{memory}: rollouts {rows.start}-{rows.stop - 1} of {len(cases)} done")
            longest = max(longest, time.monotonic() - begin)
        return made

    @cached_property
    def flow(self) -> FlowEstimator:
        return self._open_flow()

    def policy(self, memory: str, flow: FlowEstimator | None = None) -> Any:
        novelty = FlowNoveltyConfig(cycle_threshold_px=self.options.cycle_threshold_px)
        return MEMORIES[memory].build(self.spec, lambda: novelty.build(self.spec, flow or self.flow))

    def watch(
        self, memory: str, plan: Plan, cases: Sequence[Case], *, opening_latents: Tensor | None = None,
        seen: Callable[[GeneratedBlock, Any], None] = lambda made, policy: None,
    ) -> Series:  # fmt: skip
        """One batch of the real rollout under a memory, from given first latents where there are any."""
        backbone, policy = self.models.four, self.policy(memory)
        decoder = RowsDecoder(backbone.decoder)
        seeds, resume = [case.seed for case in cases], Resume(opening_latents=opening_latents)
        blocks = rollout(backbone, policy, plan, seeds=seeds, decoder=decoder, resume=resume)

        def after(made: GeneratedBlock) -> None:
            if not bool(made.latents.isfinite().all()):
                raise refuse("latents", f"block {made.block.index}", "not finite", "try --dtype float32")
            seen(made, policy)
            if made.block.index % 20 == 19:
                self.say(f"  {memory}: block {made.block.index + 1} of {len(plan.blocks)}")

        return watch(blocks, self.spec, self.probe, [c.actor for c in cases], after)

    def long(self, memory: str, cases: list[Case], rows: slice, seconds: float) -> Series:
        """Rollouts of one prompt throughout; drawn once for all parts that want them."""
        if (memory, rows.start) not in self._long:
            plan = make_plan([[Shot(case.prompt, seconds)] for case in cases[rows]], self.spec)
            self._long[memory, rows.start] = self.watch(memory, plan, cases[rows])
        return self._long[memory, rows.start]

    def film(self, scripts: list[Script], num_pictures: int, first: int) -> tuple[Clips, Tensor]:
        """Rendered clips and their latents; the last ones asked for are kept, since every memory asks again."""
        asked = (tuple(scripts), num_pictures, first)
        if self._filmed is None or self._filmed[0] != asked:
            clips = self.world.film(scripts, self.options.seed, num_pictures, first_index=first)
            encode = self.models.autoencoder.encode
            self._filmed = asked, (clips, torch.cat([encode(part) for part in clips.pictures.split(16)]))
        return self._filmed[1]
