"""The test bench of the embedded backbone: models, judge, world, prompts, batches and a clock."""

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
from recap.backbones.wan.spec import EMBEDDED
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.eval.judges.probe import Probe
from recap.flow.classical import ClassicalFlow
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.plan import Plan, Shot, make_plan
from recap.rollout import Resume, rollout
from recap.types import GeneratedBlock
from training.measures import RowsDecoder, Series, watch
from training.records import load_autoencoder, load_weights
from training.sampling import MANY_STEPS, EulerBackbone, euler_sigmas
from training.script import Script
from training.world import Clips, World

T = TypeVar("T")
B = TypeVar("B", bound=WanBackbone)
Answer = tuple[dict[str, Any], list[list[str]]]
"""The numbers of a part and the table that shows them."""

SEED = 20_000_000
"""This seed is beyond those of training and its own evaluations."""

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
"""The pictures on stage: the actor is gone for 2 s and returns with block 6; a sink, or only a bank, can have it."""

LOOKUP_PAST, LOOKUP_GENERATED = 6, 2
"""The numbers of blocks."""

SEGMENTS = (("A", 3.0, False), ("B", 6.0, True), ("C", 7.5, False), ("D", 7.5, True))
"""Name, seconds, and whether the prompt names the subject."""

SETTLING_S = 1.0
"""This much is skipped after every cut."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a measurement; None means the default of the part.

    `repeats` is the number of seeds per prompt in the parts that compare memories.
    """

    prompts: int | None = None
    repeats: int = 2
    seconds: float | None = None
    rows: int = 50
    seed: int = SEED
    memories: tuple[str, ...] = tuple(MEMORIES)
    cycle_threshold_px: float = FlowNoveltyConfig().cycle_threshold_px
    dtype: str = "float32"
    flow: str = "classical"
    device: str = "cpu"


class Case(NamedTuple):
    """One rollout to generate: prompts with and without a subject, and its noise seed."""

    prompt: str
    empty: str
    actor: str
    seed: int
    cluster: int


def make_prompts(num: int, seed: int, actors: int = 1) -> list[Prompt]:
    """Draw different random prompts, whose first actors cycle through the whole cast."""
    most = len(ACTORS) * len(SCENES) * len(TIMES)
    if num > most:
        raise refuse("--prompts", num, f"at most {most} differ", "use more --repeats instead")
    generator = random.Random(seed * 10 + actors)
    made: dict[Prompt, None] = {}
    while len(made) < num:
        first = ACTORS[len(made) % len(ACTORS)]
        others = generator.sample([actor for actor in ACTORS if actor != first], actors - 1)
        made[Prompt((first, *others), generator.choice(SCENES), generator.choice(TIMES))] = None
    return list(made)


def make_cases(num_prompts: int, repeats: int, seed: int) -> list[Case]:
    """Make cases of one actor: every prompt with several seeds."""
    return [
        Case(prompt_text(p), prompt_text(Prompt((), p.scene, p.time)), p.actors[0], seed + i * repeats + k, i)
        for i, p in enumerate(make_prompts(num_prompts, seed))
        for k in range(repeats)
    ]


class Models(NamedTuple):
    """The models under test.

    `four` is the model as shipped. `many` is its teacher; without one it is None, because a distilled model no
    longer predicts a flow.
    """

    four: WanBackbone
    many: EulerBackbone | None
    autoencoder: Autoencoder


def load_models(
    folder: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    teacher: Path | None = None,
    guidance: float = 1.0,
    teacher_steps: int = MANY_STEPS,
) -> Models:
    """Load the models of a folder, in whole files or parts; the autoencoder stays in fp32."""
    autoencoder = load_autoencoder(folder / "autoencoder.safetensors", device)
    four = join_parts(WanBackbone, *_load_transformer(folder, device, dtype), autoencoder)
    if teacher is None:
        return Models(four, None, autoencoder)
    model, text = _load_transformer(teacher, device, dtype)
    return Models(four, join_many(model, text, autoencoder, guidance, teacher_steps), autoencoder)


def _load_transformer(folder: Path, device: str, dtype: torch.dtype) -> tuple[CausalWan, WordTable]:
    model, text = CausalWan(EMBEDDED), WordTable(slots=has_slots(folder / "text.safetensors"))
    model.load_state_dict(load_weights(folder / "dit.safetensors"))
    text.load_state_dict(load_weights(folder / "text.safetensors"))
    return model.to(device, dtype).requires_grad_(False), text.to(device).requires_grad_(False)


def join_parts(kind: type[B], model: CausalWan, text: WordTable, autoencoder: Autoencoder) -> B:
    return kind(model, text.encode, lambda: StreamingDecoder(autoencoder))


def join_many(
    model: CausalWan,
    text: WordTable,
    autoencoder: Autoencoder,
    guidance: float = 1.0,
    steps: int = MANY_STEPS,
) -> EulerBackbone:
    """Make a backbone that samples the model with many Euler steps."""
    many = join_parts(EulerBackbone, model, text, autoencoder)
    many._sigmas = euler_sigmas(steps, model.spec.shift)
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
            remedy = "train it with python -m training.probe"
            raise refuse("--probe", None, "this part needs the judge", remedy)
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
        """Split rows into batches of whole prompts."""
        step = max(1, self.options.rows // self.options.repeats) * self.options.repeats
        return [slice(start, min(start + step, num)) for start in range(0, num, step)]

    def sweep(
        self, cases: list[Case], generate: Callable[[str, slice], T], memories: Sequence[str]
    ) -> dict[str, list[T]]:
        """Generate batch after batch with all memories, while there is time for another."""
        made: dict[str, list[T]] = {memory: [] for memory in memories}
        longest = 0.0
        for number, rows in enumerate(self.batches(len(cases))):
            begin = time.monotonic()
            if number and not self.time_left(longest):
                self.say(f"out of time: {rows.start} of {len(cases)} rollouts")
                break
            for memory in memories:
                made[memory].append(generate(memory, rows))
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
        self, memory: str, plan: Plan, cases: Sequence[Case], *, past: Tensor | None = None,
        after: Callable[[GeneratedBlock, Any], None] = lambda made, policy: None,
    ) -> Series:  # fmt: skip
        """Measure one batch of the real rollout with a memory; `past` has the latents of its first blocks."""
        backbone, policy = self.models.four, self.policy(memory)
        decoder = RowsDecoder(backbone.decoder)
        seeds, resume = [case.seed for case in cases], Resume(opening_latents=past)
        blocks = rollout(backbone, policy, plan, seeds=seeds, decoder=decoder, resume=resume)

        def after_block(made: GeneratedBlock) -> None:
            if not bool(made.latents.isfinite().all()):
                raise refuse("latents", f"block {made.block.index}", "not finite", "try --dtype float32")
            after(made, policy)
            if made.block.index % 20 == 19:
                self.say(f"  {memory}: block {made.block.index + 1} of {len(plan.blocks)}")

        return watch(blocks, self.spec, self.probe, [c.actor for c in cases], after_block)

    def long(self, memory: str, cases: list[Case], rows: slice, seconds: float) -> Series:
        """Measure rollouts of one prompt each; they are generated once for all parts."""
        if (memory, rows.start) not in self._long:
            plan = make_plan([[Shot(case.prompt, seconds)] for case in cases[rows]], self.spec)
            self._long[memory, rows.start] = self.watch(memory, plan, cases[rows])
        return self._long[memory, rows.start]

    def film(self, scripts: list[Script], num_pictures: int, first: int) -> tuple[Clips, Tensor]:
        """Render clips and encode them; the last result is cached, since every memory needs it."""
        key = (tuple(scripts), num_pictures, first)
        if self._filmed is None or self._filmed[0] != key:
            clips = self.world.film(scripts, self.options.seed, num_pictures, first_index=first)
            encode = self.models.autoencoder.encode
            self._filmed = key, (clips, torch.cat([encode(part) for part in clips.pictures.split(16)]))
        return self._filmed[1]
