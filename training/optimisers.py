"""Optimisers and averages for runs of fixed duration: Muon, a rate that follows the clock, and mean weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The coefficients of the quintic iteration that brings singular values close to one in five rounds."""


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates; matrices of one shape are processed as one batch.

    The update is scaled to the root mean square of AdamW's, so that rates mean the same in both. A convolution counts
    as a matrix of (out, all the rest).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, float]) -> None:
        averages = [self._average(parameter) for parameter in parameters]
        weights: list[Tensor] = list(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, averages, group["momentum"])
        stacked = torch.stack([update.flatten(1) for update in nesterov])
        straight = orthogonal(stacked) * (0.2 * max(stacked.shape[1:]) ** 0.5)
        updates = [u.view_as(p) for u, p in zip(straight.unbind(0), parameters, strict=True)]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _average(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        average: Tensor = state["average"]
        return average


def orthogonal(matrices: Tensor) -> Tensor:
    """Orthogonalise matrices N R C by five Newton-Schulz rounds in bf16."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Clock:
    """A budget of wall-clock time: the rate follows the time used, so a run always ends with a decayed rate."""

    def __init__(self, minutes: float, *, reserve_s: float, warmup_s: float, floor: float = 0.01) -> None:
        self._began = time.monotonic()
        self._training_s = max(60 * minutes - reserve_s, 1e-6)
        self._warmup_s = warmup_s
        self._floor = floor
        self._first_step: float | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def finished(self) -> bool:
        return self.elapsed_s >= self._training_s

    def rate(self) -> float:
        """Return the factor on learning rates: a linear warm-up, then half a cosine down to the floor."""
        now = self.elapsed_s
        if self._first_step is None:
            self._first_step = now
        rise = min(1.0, (now - self._first_step + 0.5) / max(self._warmup_s, 0.5))
        span = max(self._training_s - self._first_step, 1e-6)
        used = min(max((now - self._first_step) / span, 0.0), 1.0)
        return rise * (self._floor + (1 - self._floor) * 0.5 * (1 + math.cos(math.pi * used)))

    def apply(self, optimisers: Iterable[torch.optim.Optimizer]) -> float:
        """Set the rate of every group from its own full rate, `peak`."""
        rate = self.rate()
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * rate
        return rate


class RunningMean:
    """An exponential mean of a model's parameters, fast at first so that early checkpoints are usable."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = list(model.parameters())
        self._means = [p.detach().clone() for p in self._parameters]
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self._decay, (self._steps + 1) / (self._steps + 10))
        torch._foreach_lerp_(self._means, [p.detach() for p in self._parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the means and the parameters; a second call puts them back."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(current)


def split_parameters(model: nn.Module, inside: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split off the matrices and convolutions whose names start with `inside`, for Muon."""
    matrices = [p for name, p in model.named_parameters() if p.dim() in (2, 4) and name.startswith(inside)]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]
