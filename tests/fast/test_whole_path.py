"""The whole fast path: all memories next to the readable one, forks, resumption, rollouts in turns, no growth.

Everything runs on a CPU at a small size, and where there is a GPU there, too, also at the size of the public models.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from recap.config import RunConfig
from recap.contracts import Backbone, Decoder, State
from recap.fast.accelerate import accelerate, choose_aside
from recap.fast.backbone import FastWanBackbone
from recap.fast.speed import Parts, SpeedSettings, make_parts
from recap.plan import Plan, Shot, make_plan
from recap.registry import MEMORIES, load_backbone
from recap.rollout import Resume, Rollout, reach, rollout
from recap.run import build_memory
from recap.session import Session
from recap.types import BackboneSpec, GeneratedBlock

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
PLACES = [
    ("untrained", "full", "cpu", "float32"),
    pytest.param(("untrained", "full", "cuda", "float32"), marks=pytest.mark.cuda),
    # Random weights at the real size; the tiny decoder has a readable version without a file.
    pytest.param(("self-forcing", "tiny", "cuda", "bfloat16"), marks=pytest.mark.cuda),
    pytest.param(("causal-forcing-2step", "tiny", "cuda", "bfloat16"), marks=pytest.mark.cuda),
]
BLOCKS = 8
# All of eight blocks; with the 120 of its release two rollouts at real size and their states fill 72 GB.
OWN = {"relax-forcing": {"reservoir_frames": 24}}
# Largest relative error of a block's latents and of what a memory keeps; `recap bench --compare` has the same limits.
LIMITS = {("cpu", "float32"): 1e-4, ("cuda", "float32"): 1e-3, ("cuda", "bfloat16"): 2e-2}
# Readable and fast decoder of public models work in half precision, on pictures in 0..1.
PIXELS = {"float32": 1e-2, "bfloat16": 5e-2}

# They choose by the keys themselves, where one rounding decides between two tokens that are almost equal: on a GPU
# each block begins from the leader's memory.
BY_KEYS = ("deep-forcing", "relax-forcing", "recap-plus")


class Led:
    """A backbone that generates every block itself, keeps it to be compared, and continues from the leader's block.

    So one block's rounding is not the next one's error, and a bank chooses by the same pictures.
    """

    def __init__(self, backbone: Backbone, leader: Sequence[GeneratedBlock]) -> None:
        self.spec = backbone.spec
        self.condition = backbone.condition
        self.settle = backbone.settle
        self.latents: list[Tensor] = []
        self.pixels: list[Tensor] = []
        self._backbone = backbone
        self._decoder = backbone.decoder()
        self._leader = leader

    def denoise(self, *given: Any) -> Tensor:
        self.latents.append(self._backbone.denoise(*given))
        return self._leader[len(self.latents) - 1].latents.clone()

    def decoder(self) -> Decoder:
        return self  # type: ignore[return-value]

    def decode(self, latents: Tensor) -> Tensor:
        self.pixels.append(self._decoder.decode(latents))
        return self._leader[len(self.pixels) - 1].pixels.clone()


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def paths(request: Any) -> Iterator[tuple[SpeedSettings, Parts, Parts]]:
    """The settings, and the parts of the readable and of the fast path, of equal weights."""
    name, decoder, device, dtype = request.param
    settings = [
        SpeedSettings(name, "recap", decoder, device, dtype, BLOCKS, eager=eager) for eager in (True, False)
    ]
    yield settings[0], make_parts(settings[0]), make_parts(settings[1])
    gc.collect()


def plan_of(spec: BackboneSpec, blocks: int = BLOCKS) -> Plan:
    """Two shots of equal length, with a cut between them."""
    block_s = spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    half = blocks // 2
    return make_plan([[Shot("a red boat", half * block_s), Shot("a blue house", half * block_s)]], spec)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Compare part by part: in fp64 the whole past that a memory keeps would fill a GPU several times."""
    gap, size = 0.0, 0.0
    for one, other in zip(found.reshape(-1).split(2**26), wanted.reshape(-1).split(2**26), strict=True):
        gap += float((one.double() - other.double()).square().sum())
        size += float(other.double().square().sum())
    return (gap / max(size, 1e-24)) ** 0.5


def common_tokens(kept: State, found: State) -> tuple[State, State]:
    """Return two states with those tokens of their banks that both have, in one order: almost all of them."""
    slots = [
        {tuple(place): slot for slot, place in enumerate(state["bank.source"][0].tolist())}
        for state in (kept, found)
    ]
    common = sorted(slots[0].keys() & slots[1].keys())
    assert len(common) >= 0.9 * len(slots[0])
    reduced = []
    for state, own in zip((kept, found), slots, strict=True):
        rest = {name: value for name, value in state.items() if not name.startswith(("bank.", "admission."))}
        order = [own[place] for place in common]
        reduced.append(rest | {name: state[name][:, :, order] for name in ("bank.keys", "bank.values")})
    return reduced[0], reduced[1]


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_generates_and_keeps_what_it_does_on_the_readable_path(
    paths: tuple[SpeedSettings, Parts, Parts], memory: str
) -> None:
    settings, readable, fast = paths
    spec, device, limit = readable.backbone.spec, settings.device, LIMITS[settings.device, settings.dtype]
    assert isinstance(fast.backbone, FastWanBackbone) and not isinstance(readable.backbone, FastWanBackbone)
    # Recordings and windows of the last memory are not needed any more, also if its test failed.
    fast.backbone._runners.clear()
    gc.collect()
    config = RunConfig.from_dict(
        {
            "shots": [{"prompt": "a", "seconds": 1}],
            "memory": {"name": memory, **OWN.get(memory, {})},
            "backbone": settings.backbone,
            "flow": "classical",
        }
    )
    policies, by_keys = [build_memory(config, spec) for _ in range(2)], memory in BY_KEYS and device == "cuda"
    leader: list[GeneratedBlock] = []
    led, plan = Led(fast.backbone, leader), plan_of(spec)
    slow = rollout(readable.backbone, policies[0], plan, seeds=[0])
    quick = rollout(led, policies[1], plan, seeds=[0], aside=choose_aside(device))
    made = []
    for index in range(BLOCKS):
        if index and by_keys:
            policies[1].load_state(policies[0].state())
        leader.append(next(slow))
        made.append(next(quick))
        assert relative_error(led.latents[-1], leader[-1].latents) < limit, f"block {index}"
        assert float((led.pixels[-1] - leader[-1].pixels).abs().mean()) < PIXELS[settings.dtype]
    for one, other in zip(leader, made, strict=True):
        assert one.memory.tokens == other.memory.tokens
    kept, found = (policy.state() for policy in policies)
    assert kept.keys() == found.keys()
    if by_keys and "bank.source" in kept:
        kept, found = common_tokens(kept, found)
    for name, tensor in kept.items():
        if tensor.is_floating_point() and tensor.numel():
            assert relative_error(found[name], tensor) < limit, name


def fast_backbone(device: str) -> Backbone:
    backbone = accelerate(load_backbone("untrained", device=device), on_cpu=True)
    assert isinstance(backbone, FastWanBackbone)
    return backbone


def config_of(device: str, memory: str = "recap", seed: int = 0, prompt: str = "a red boat") -> RunConfig:
    return RunConfig.from_dict(
        {
            "shots": [{"prompt": prompt, "seconds": 6.0}],
            "backbone": "untrained",
            "memory": memory,
            "flow": "classical",
            "seeds": [seed],
            "device": device,
            "dtype": "float32",
        }
    )


def same(found: Sequence[Tensor], wanted: Sequence[Tensor], device: str) -> None:
    """Bit for bit on a CPU; on a GPU a recording may round otherwise than the call that it was made from."""
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        limit = 0.0 if device == "cpu" else 1e-5
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=10 * limit, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", ["sink", "recap", "memrope"])
def test_a_fork_continues_as_the_original_did(device: str, memory: str) -> None:
    session = Session(config_of(device, memory), backbone=fast_backbone(device))
    blocks = [session.step() for _ in range(BLOCKS)]
    fork = session.fork(3)
    # The original goes on in between, on the same windows.
    session.step()
    forked = []
    for _ in blocks[3:]:
        forked.append(fork.step())
        session.step()
    same([made.latents for made in forked], [made.latents for made in blocks[3:]], device)
    session.rewind(5)
    same([session.step().latents for _ in blocks[5:]], [made.latents for made in blocks[5:]], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_stopped_rollout_continues_by_its_files_on_new_windows(device: str, memory: str) -> None:
    """What was recorded before is not there: the first call after resuming is a warm-up again."""
    config, stop = config_of(device, memory), 5
    first = fast_backbone(device)
    spec = first.spec
    policy, decoder = build_memory(config, spec), first.decoder()
    whole, kept = [], {}
    for made in rollout(first, policy, plan_of(spec), seeds=[0], decoder=decoder, aside=choose_aside(device)):
        whole.append(made.latents)
        if len(whole) == stop:
            parts = {"policy": policy.state(), "decoder": decoder.state()}
            kept = {
                name: save({key: value.cpu().contiguous() for key, value in state.items()})
                for name, state in parts.items()
            }
    again = fast_backbone(device)
    policy, decoder = build_memory(config, spec), again.decoder()
    for part, name in ((policy, "policy"), (decoder, "decoder")):
        part.load_state({key: value.to(device) for key, value in load(kept[name]).items()})
    resume = Resume(stop, recent_latents=whole[stop - reach(spec) : stop], first_latent=whole[0][:, :1])
    continued = rollout(
        again, policy, plan_of(spec), seeds=[0], decoder=decoder, resume=resume, aside=choose_aside(device)
    )
    same([made.latents for made in continued], whole[stop:], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memories", [("recap", "recap"), ("recap", "sink"), ("none", "deep-forcing")])
def test_two_rollouts_may_take_turns(device: str, memories: tuple[str, str]) -> None:
    """Windows and texts are storage that both fill: in turns of one, two and three blocks."""
    backbone = fast_backbone(device)

    def begun(row: int) -> Rollout:
        config = config_of(device, memories[row], seed=row)
        policy = build_memory(config, backbone.spec)
        plan = make_plan([[Shot(("a red boat", "a blue house")[row], 6.0)]], backbone.spec)
        return rollout(backbone, policy, plan, seeds=[row], aside=choose_aside(device))

    alone = [[made.latents for made in begun(row)] for row in (0, 1)]
    both, turns = [begun(0), begun(1)], [0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1]
    found: list[list[Tensor]] = [[], []]
    for row in turns:
        found[row].append(next(both[row]).latents)
    for row in (0, 1):
        same(found[row], alone[row], device)


GROWTH = [
    ("untrained", "full", "cpu", 40),
    pytest.param(("untrained", "full", "cuda", 200), marks=pytest.mark.cuda),
    pytest.param(("self-forcing", "tiny", "cuda", 200), marks=pytest.mark.cuda),
]


def bytes_in_use(device: str) -> tuple[int, ...]:
    """What the allocator has handed out and what it has reserved; on a CPU the storage of all tensors."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return (sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),)


@pytest.mark.parametrize("place", GROWTH, ids=lambda place: "-".join(map(str, place)))
def test_memory_in_use_does_not_grow(place: tuple[str, str, str, int]) -> None:
    name, decoder, device, blocks = place
    dtype = "float32" if name == "untrained" else "bfloat16"
    settings = SpeedSettings(name, "recap", decoder, device, dtype, blocks)
    parts = make_parts(settings)
    plan = plan_of(parts.backbone.spec, blocks)
    # The second shot has other prompts and another window for a while; both have had their recordings by then.
    steady = blocks // 2 + 10
    seen = {}
    for made in rollout(parts.backbone, parts.policy(settings), plan, seeds=[0], aside=choose_aside(device)):
        if made.block.index in (steady, blocks - 1):
            seen[made.block.index] = bytes_in_use(device)
    in_use, *reserved = zip(seen[blocks - 1], seen[steady], strict=True)
    # Less than the blocks' latents at the real size add up to; the allocator's own pieces are of 2 MB.
    assert in_use[0] - in_use[1] <= (2**22 if device == "cuda" else 0)
    for late, before in reserved:
        assert late <= 1.01 * before + 2**21
