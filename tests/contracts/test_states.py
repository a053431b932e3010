"""Every state that is handed back, changed: it is refused before anything is used, or it works.

One entry at a time is dropped, or gets another type, shape or value. What cannot be told from a good state, such as
other values of keys, is loaded and another block is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recap.errors import RecapError
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastVae
from recap.flow import ClassicalFlow
from recap.plan import Shot, make_plan
from recap.registry import ADMISSIONS, MEMORIES
from recap.rollout import Resume, rollout
from tests.contracts.test_admissions import config_of
from tests.contracts.test_decoders import FAMILIES, latents, opener
from tests.contracts.test_policies import CONFIGS, lasting

# Frames after which a state is taken: the window is full, and the quick memories have compressed.
STOP = 9
# Every memory with the rule of the paper, and all other rules with the memory of the paper.
PAIRS = [(name, "flow") for name in MEMORIES] + [("recap", rule) for rule in ADMISSIONS if rule != "flow"]


def changed(value: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield other values for an entry, with what is wrong with them."""
    floats = value.is_floating_point()
    for dtype in (torch.int32, torch.float16) if floats else (torch.float32, torch.int32, torch.bool):
        yield str(dtype), value.to(dtype)
    yield "no tensor", 3
    yield "one more axis", value[None]
    yield "a scalar" if value.dim() else "a vector", value.flatten()[0] if value.dim() else value.repeat(2)
    for axis, size in enumerate(value.shape):
        yield f"one fewer along {axis}", value.narrow(axis, 0, size - 1).clone()
        yield f"twice as many along {axis}", torch.cat([value, value], axis)
    for filling in (float("nan"), float("-inf"), 1.0) if floats else (-7, 10**9, 99, 1, 0):
        yield (
            f"filled with {filling}",
            torch.full_like(value, filling % 256 if not value.is_signed() else filling),
        )


def attack(state: dict[str, Tensor], load: Callable[[Any], Callable[[], Any]]) -> set[str]:
    """Load every change of a state, and use what is not refused; returns the names of what was."""
    cases = [(name, "dropped", {n: v for n, v in state.items() if n != name}) for name in state]
    cases += [(name, what, {**state, name: other}) for name in state for what, other in changed(state[name])]
    cases.append(("strange", "more", {**state, "strange": torch.zeros(1)}))
    refused = {}
    for name, what, other in cases:
        try:
            use = load(other)
        except RecapError as error:
            refused[f"{name} {what}"] = str(error)
            continue
        except Exception as error:
            raise AssertionError(f"{name}, {what}: load_state raised {error!r}") from error
        try:
            use()
        except Exception as error:
            if len(state) == 1 and "rows of frames" in str(error):
                # One tensor of more rows is a good state, of a larger batch.
                continue
            raise AssertionError(f"{name}, {what}: was loaded and then {error!r}") from error
    for said in refused.values():
        assert "state" in said and "; load what `state` returned" in said
    return set(refused)


@pytest.mark.parametrize(("memory", "rule"), PAIRS)
def test_a_changed_state_of_a_memory_is_refused_or_works(memory, rule, dino, backbone):
    spec = backbone.spec
    stop = STOP // spec.frames_per_block
    plan = make_plan([[Shot("a red boat", lasting(spec, stop + 1))]] * 2, spec)

    def fresh():
        return CONFIGS[memory].build(spec, lambda: config_of(rule, dino).build(spec, ClassicalFlow()))

    def blocks(policy, start, decoder):
        return rollout(backbone, policy, plan, seeds=[0, 1], decoder=decoder, resume=Resume(start))

    first, decoder = fresh(), backbone.decoder()
    begun = blocks(first, 0, decoder)
    for _ in range(stop):
        next(begun)
    state, decoded = first.state(), decoder.state()

    def load(other):
        policy, stream = fresh(), backbone.decoder()
        policy.load_state(other)
        stream.load_state(decoded)
        return lambda: next(blocks(policy, stop, stream))

    refused = attack(state, load)
    assert {f"{name} dropped" for name in state} | {"strange more"} <= refused
    for name, value in state.items():
        wrong = "nan" if value.is_floating_point() else "-7"
        assert {f"{name} filled with {wrong}", f"{name} one more axis", f"{name} no tensor"} <= refused
    load(state)()


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("name", [*FAMILIES, "fast wan vae", "fast taehv"])
def test_a_changed_state_of_a_decoder_is_refused_or_works(name, frames):
    opened = opener(name.removeprefix("fast "))
    if name == "fast wan vae":
        opened = FastVae.of(opened.__self__).open_decoder
    elif name == "fast taehv":
        opened = FastTaehv(opened.__self__).open_decoder
    stream = opened()
    stream.decode(latents(frames, rows=1))
    state = stream.state()

    def load(other):
        again = opened()
        again.load_state(other)
        return lambda: again.decode(latents(1, rows=1))

    refused = attack(state, load)
    # A stream that has seen nothing has an empty state.
    alone = {f"{entry} dropped" for entry in state} if len(state) > 1 else set()
    assert alone | {"strange more"} <= refused
    load(state)()
