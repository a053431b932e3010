"""What both fast decoders promise about their storage, and after errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recap.backbones.wan.taehv import Taehv
from recap.backbones.wan.vae import WanVae
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastVae


def full() -> tuple[Any, Callable[[Any], None]]:
    from diffusers import AutoencoderKLWan

    fast = FastVae.of(WanVae(AutoencoderKLWan(base_dim=4)))
    return fast, lambda last: setattr(fast.conv_out, "forward", last)


def tiny() -> tuple[Any, Callable[[Any], None]]:
    fast = FastTaehv(Taehv())
    return fast, lambda last: setattr(fast, "last", last)


@pytest.fixture(params=[full, tiny])
def made(request: pytest.FixtureRequest) -> tuple[Any, Callable[[Any], None]]:
    """A decoder, and a way to change its last layer."""
    torch.manual_seed(0)
    decoder: tuple[Any, Callable[[Any], None]] = request.param()
    return decoder


def latents(frames: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, frames, 16, 4, 6, generator=torch.Generator().manual_seed(frames))


def addresses(stream: Any) -> list[int]:
    return [kept.data_ptr() for kept in stream._kept]


def test_states_are_loaded_where_recordings_look_for_them(made: Any) -> None:
    stream, other = made[0].open_decoder(), made[0].open_decoder()
    first = stream.decode(latents(1))
    early = stream.state()
    following = stream.decode(latents(3))
    before, recordings = addresses(stream), stream._steady
    for state, block, goal in ((early, 3, following), ({}, 1, first), (early, 3, following)):
        stream.load_state(state)
        assert torch.equal(stream.decode(latents(block)), goal)
        assert addresses(stream) == before and stream._steady is recordings
    other.decode(latents(1, rows=2))
    stream.load_state(other.state())
    assert stream._steady is not recordings
    assert torch.equal(stream.decode(latents(3, rows=2)), other.decode(latents(3, rows=2)))
    stream.load_state({})
    assert torch.equal(stream.decode(latents(1)), first)


def test_storage_goes_with_the_stream(made: Any) -> None:
    """At full size it is gigabytes, which a reference cycle would keep until the garbage collector runs."""
    stream = made[0].open_decoder()
    stream.decode(latents(1))
    stream.decode(latents(1))
    kept = weakref.ref(stream._kept[0])
    gc.disable()
    try:
        del stream
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("head", [0, 1])
def test_after_an_error_within_a_block_a_state_is_asked_for(made: Any, head: int) -> None:
    """Layers before the one that failed are already a block ahead."""
    fast, change = made
    stream = fast.open_decoder()
    if head:
        stream.decode(latents(head))
    state = stream.state()

    def fail(x: Tensor) -> Tensor:
        raise MemoryError

    kept = fast.conv_out.forward if isinstance(fast, FastVae) else fast.last
    change(fail)
    with pytest.raises(MemoryError):
        stream.decode(latents(3))
    change(kept)
    for ask in (lambda: stream.decode(latents(3)), stream.state):
        with pytest.raises(RuntimeError, match="load an earlier state"):
            ask()
    stream.load_state(state)
    whole = fast.open_decoder()
    if head:
        whole.decode(latents(head))
    assert torch.equal(stream.decode(latents(3)), whole.decode(latents(3)))


def test_no_value_is_read_on_the_host_by_the_tiny_decoder() -> None:
    """On the meta device there are no values: whatever asked for one would fail."""
    fast = FastTaehv(Taehv().to("meta"))
    kept = [torch.zeros(shape, device="meta") for shape in fast.memories((2, 4, 6))]
    assert fast.forward(latents(3, rows=2).to("meta"), kept).shape == (2, 12, 3, 32, 48)
