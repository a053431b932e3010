"""Copies tensors into states: on their own device, or straight to the host for a state that is written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_on_host: ContextVar[bool] = ContextVar("states_on_host", default=False)


@contextmanager
def states_on_host() -> Iterator[None]:
    """Let states be made on the host: a card needs no room for a second memory and decoder, which is gigabytes."""
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


def state_copy(tensor: Tensor) -> Tensor:
    """Return a copy without gaps, for a state."""
    whole = tensor.contiguous()
    if _on_host.get():
        return whole.to("cpu", copy=True)
    return whole.clone() if whole is tensor else whole
