"""The bookkeeping of the upstream caches, compared with the stand-ins' own writing of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import upstream_wan as wan
from pipelines import make
from upstream_ll1 import look_up
from upstream_sf import CausalWanSelfAttention, store

from recap.attach.cache import plan_write, write_later, write_now
from recap.attach.checkout import CheckoutKernels, find_checkout
from recap.types import frame_positions

SIZES = [(6, 0), (6, 1), (7, 1), (9, 5), (12, 3), (12, 5)]


def empty(frames):
    keys = torch.zeros(1, 6 * frames, 2, 4)
    indices = {name: torch.tensor([0]) for name in ("global_end_index", "local_end_index")}
    return {"k": keys, "v": keys.clone(), **indices}


def passes(blocks=6, steps=3):
    for block in range(blocks):
        for _ in range(steps):
            keys, values = torch.randn(2, 1, 18, 2, 4)
            yield 18 * block, keys, values


@pytest.mark.parametrize(("window", "sink"), SIZES)
def test_written_at_once_as_self_forcing_does(window, sink):
    mine, theirs = empty(window), empty(window)
    attention = CausalWanSelfAttention(window, sink)
    for start, keys, values in passes():
        write = plan_write(mine, start, 18, sink_tokens=6 * sink, rolls=True, protects_sink=False)
        write_now(mine, write, keys, values)
        store(attention, theirs, keys, values, start)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("window", "sink"), SIZES)
def test_handed_back_as_longlive_does(window, sink):
    """A sink that ends inside block 1 is protected from all but the block's first step."""
    cache, attention = empty(window), CausalWanSelfAttention(window, sink)
    for start, keys, values in passes():
        write = plan_write(cache, start, 18, sink_tokens=6 * sink, rolls=True, protects_sink=True)
        mine = write_later(write, keys, values)
        theirs = look_up(attention, cache, keys, values, start, False)[3]
        assert mine[:2] == theirs[:2] and mine[2].keys() == theirs[2].keys()
        for name, value in theirs[2].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine[2][name], value), name
            else:
                assert mine[2][name] == value, name
        wan.CausalWanModel._apply_cache_updates([cache], [(0, mine)])


@pytest.mark.parametrize("emptied", ["global_end_index", "local_end_index"])
def test_a_cache_emptied_amid_a_video_is_refused(emptied):
    """Also where another thread has emptied it between the reading of its two indices, and only one is 0."""
    cache = {**empty(6), "global_end_index": torch.tensor([36]), "local_end_index": torch.tensor([36])}
    cache[emptied] = torch.tensor([0])
    for start in (0, 18, 36):
        with pytest.raises(ValueError, match=f"kv_cache is 0: it was emptied while token {start}"):
            plan_write(cache, start, 18, sink_tokens=0, rolls=True, protects_sink=False)


def test_keys_are_turned_by_the_checkouts_table_to_the_last_bit_of_fp64():
    """In fp64 and at the real head size, where angles computed in another way show; beyond the table they are."""

    def table(length):
        return torch.cat([wan.rope_params(length, 44), *[wan.rope_params(length, 42)] * 2], dim=1)

    def turned(phases):
        return kernels.turn(x, kernels.table(frame_positions(phases, (2, 3)), x))

    checkout = replace(find_checkout(make("self-forcing")), model=SimpleNamespace(freqs=table(1024)))
    kernels, x = CheckoutKernels(checkout), torch.randn(1, 24, 2, 128, dtype=torch.float64)
    grid = torch.tensor([[4, 2, 3]])
    listed, beyond = torch.tensor([0, 5, 333, 1023]), torch.tensor([1, 1024, 1500, 1999])
    assert torch.equal(turned(listed), wan.rope_at(x, grid, table(1024), listed))
    torch.testing.assert_close(turned(beyond), wan.rope_at(x, grid, table(2000), beyond), atol=1e-11, rtol=0)
    halfway = kernels.table(torch.tensor([0.5, 0.0, 0.0]).expand(1, 24, 3), x)
    once = kernels.turn(kernels.turn(turned(torch.zeros(4)), halfway), halfway)
    torch.testing.assert_close(once, turned(torch.ones(4)), atol=1e-12, rtol=0)
