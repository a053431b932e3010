"""States are copies, on the host if they are made to be written."""

from __future__ import annotations

import pytest
import torch

from recap.backbones.wan.spec import UNTRAINED
from recap.backbones.wan.taehv import Taehv
from recap.contracts import copies
from recap.fast.taehv import FastTaehv
from recap.memory.pinned import PinnedGroup, PinnedTokens
from recap.memory.store import Store
from recap.types import Candidates, state_copy, states_on_host


def test_a_copy_is_whole_and_never_the_tensor_itself() -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    for given in (tensor, tensor.movedim(-1, 1), tensor[:, :2]):
        for made in (state_copy(given), *_on_host(given)):
            assert torch.equal(made, given) and made.is_contiguous()
            assert made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def _on_host(tensor: torch.Tensor) -> list[torch.Tensor]:
    with states_on_host():
        return [state_copy(tensor), *copies({"one": tensor, "none": None}).values()]


def test_a_decoders_state_is_the_same_either_way() -> None:
    stream = FastTaehv(Taehv().requires_grad_(False)).open_decoder()
    stream.decode(torch.randn(1, 3, 16, 4, 4))
    usual = stream.state()
    with states_on_host():
        hosted = stream.state()
    assert usual.keys() == hosted.keys() and all(torch.equal(usual[name], hosted[name]) for name in usual)


def test_pinned_tokens_are_saved_without_gaps() -> None:
    spec = UNTRAINED.backbone_spec()
    tokens = torch.randn(spec.layers, 2, spec.heads, 5, spec.head_dim).transpose(2, 3)
    entries = Candidates(torch.zeros(2, 5, 3, dtype=torch.int64), torch.ones(2, 5))
    pinned = PinnedTokens(spec)
    pinned.add("fox", PinnedGroup(tokens, tokens, entries))
    state = pinned.state()
    assert torch.equal(state["pinned.0.keys"], tokens)
    assert all(each.is_contiguous() for each in state.values())


@pytest.mark.cuda
def test_on_a_gpu_a_state_for_a_file_takes_no_room_there() -> None:
    store = Store(num_layers=4, num_tokens=1000)
    store.allocate(torch.zeros(1, 1, 8, 64, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with states_on_host():
        state = store.state("bank")
    assert not any(value.is_cuda for value in state.values())
    assert torch.cuda.max_memory_allocated() == before
