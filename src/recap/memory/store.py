"""This module allocates fixed storage for the keys and values of all layers.

One tensor serves all layers, so that a bank indexes them in one operation and a state is a few named tensors. It is
allocated at the first write, when batch size, dtype and device are known, and never again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recap.contracts import Entry, State, check_state, copies, together


class Store:
    """Keeps the keys and values of `num_tokens` tokens in every layer; `on_host`: in the CPU's memory."""

    def __init__(self, num_layers: int, num_tokens: int, *, on_host: bool = False):
        self.num_layers = num_layers
        self.num_tokens = num_tokens
        self.on_host = on_host
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """Return the keys, L B N H D."""
        assert self._keys is not None, "read before the first write"
        return self._keys

    @property
    def values(self) -> Tensor:
        """Return the values, L B N H D."""
        assert self._values is not None, "read before the first write"
        return self._values

    def allocate(self, like: Tensor) -> None:
        """Make room for the tokens of tensors shaped (..., B, any, H, D), if there is none yet."""
        if self._keys is None:
            batch, _, heads, channels = like.shape[-4:]
            shape = (self.num_layers, batch, self.num_tokens, heads, channels)
            device = "cpu" if self.on_host else like.device
            # Pinned pages are copied to the device directly.
            pinned = self.on_host and like.is_cuda
            self._keys, self._values = (
                torch.zeros(shape, dtype=like.dtype, device=device, pin_memory=pinned) for _ in range(2)
            )

    def put(self, tokens: slice, keys: Tensor, values: Tensor) -> None:
        """Overwrite these tokens in all layers with keys and values L B N H D."""
        self.allocate(keys)
        self.keys[:, :, tokens].copy_(keys)
        self.values[:, :, tokens].copy_(values)

    def state(self, name: str) -> State:
        return copies({f"{name}.keys": self._keys, f"{name}.values": self._values})

    def expected(self, name: str) -> dict[str, Entry]:
        """Return what a state must have of a store that was written to; one without room never is."""
        entry = Entry((self.num_layers, "B", self.num_tokens, "H", "D"), "tokens")
        return {f"{name}.keys": entry, f"{name}.values": entry} if self.num_tokens else {}

    def load_state(self, name: str, state: State) -> None:
        expected = together(state, self.expected(name))
        check_state({each: state[each] for each in expected if each in state}, expected)
        self._keys = self._values = None
        if expected:
            keys, values = (state[each] for each in expected)
            home = "cpu" if self.on_host else keys.device
            self._keys, self._values = keys.to(home, copy=True), values.to(home, copy=True)
