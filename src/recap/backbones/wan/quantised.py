"""Holds the linear layers of a loaded Wan transformer in 8 bits: `--precision int8` or `fp8`.

int8 halves the weights' bytes on any device: a whole number from -127 to 127 per weight and a scale per output
channel, turned back into the model's dtype for each product. A product of thousands of tokens takes far longer than
that, so the library's own product is kept.

fp8 also multiplies in 8 bits, on GPUs that can: weights with a scale per output channel and inputs with a scale per
token are e4m3 numbers. Elsewhere, and in float32, the same numbers are multiplied in float32: what it does to a video
can be judged on any machine.

Scales are fp32 and no powers of two: the largest number of a channel or token is met exactly. What is merged into the
weights, such as a LoRA, must be there before; the layers outside the transformer's blocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.wan.backbone import WanBackbone
from recap.contracts import Backbone
from recap.errors import RecapError, refuse, unknown_name
from recap.io.report import Notice

PRECISIONS = ("full", "int8", "fp8")
BUFFERS = ("values", "scale", "bias")
E4M3 = torch.float8_e4m3fn
LARGEST_INT8, LARGEST_FLOAT8 = 127.0, 448.0
# A token or channel of zeros has this as its largest value, so that nothing is divided by zero.
SMALLEST = 1e-12
# Compute capability of the first GPUs that multiply e4m3 numbers.
FLOAT8_CAPABILITY = (8, 9)


def check_precision(precision: str, device: str, dtype: str) -> None:
    """Refuse an unknown precision, and one that the device cannot compute."""
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if precision != "fp8" or device == "cpu":
        return
    if not device.startswith("cuda"):
        raise refuse("precision", precision, f"device {device} has no such numbers", "choose int8 or full")
    found = torch.cuda.get_device_capability(device)
    if found < FLOAT8_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (found, FLOAT8_CAPABILITY))
        limit = f"this GPU has compute capability {has}, and 8-bit products need {needs} (RTX 40, L4, H100)"
        raise refuse("precision", precision, limit, "choose int8, which halves the weights on any GPU")
    if dtype == "float16":
        limit = "on a GPU its products are written as bfloat16, not float16"
        raise refuse("precision", precision, limit, "add --dtype bfloat16")


class Float8Tokens(NamedTuple):
    """Holds tokens in 8 bits: values (...) M e4m3 times scale (...) 1 in fp32."""

    values: Tensor
    scale: Tensor

    def restore(self) -> Tensor:
        """Return the tokens in fp32."""
        return self.values.float() * self.scale


def quantise_tokens(x: Tensor) -> Float8Tokens:
    """Quantise every token of (...) M by its largest value."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    values = (wide * (LARGEST_FLOAT8 / largest)).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return Float8Tokens(values.to(E4M3), largest / LARGEST_FLOAT8)


class QuantisedLinear(nn.Module):
    """Is a linear layer whose weight, out x in, is 8-bit values times a scale per output channel, in fp32."""

    values: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def restore(self) -> Tensor:
        """Return the weight in fp32."""
        return self.values.float() * self.scale


class Int8Linear(QuantisedLinear):
    """Keeps whole numbers from -127 to 127, each at most half a step from its weight."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Quantise a layer."""
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / LARGEST_INT8
        return cls((weight / scale).round().to(torch.int8), scale, linear.bias.detach())

    @property
    def weight(self) -> Tensor:
        """Return the weight, restored to the dtype of the bias; on a GPU by one kernel, without copies in between."""
        restored = torch.empty_like(self.values, dtype=self.bias.dtype)
        torch.mul(self.values, self.scale, out=restored)
        return restored

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Float8Linear(QuantisedLinear):
    """Multiplies e4m3 weights and inputs; inputs that are not quantised yet are quantised token by token."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Float8Linear:
        """Quantise a layer."""
        values, scale = quantise_tokens(linear.weight.detach())
        return cls(values, scale, linear.bias.detach())

    @cached_property
    def reach(self) -> tuple[float, float]:
        """Return a and b such that of inputs with scale s no output exceeds 448 (a s + b), before any GELU.

        By Cauchy and Schwarz, from the longest weight, the number of inputs and the largest bias.
        """
        longest = self.restore().norm(dim=1).max()
        factor = float(longest) * self.values.shape[1] ** 0.5
        return factor, float(self.bias.float().abs().max()) / LARGEST_FLOAT8

    def forward(self, x: Tensor | Float8Tokens) -> Tensor:
        tokens = x if isinstance(x, Float8Tokens) else quantise_tokens(x)
        if not self.values.is_cuda or self.bias.dtype != torch.bfloat16:
            emulated = functional.linear(tokens.restore(), self.restore(), self.bias.float())
            return emulated.to(self.bias.dtype)
        shape = tokens.values.shape[:-1]
        product = torch._scaled_mm(
            tokens.values.flatten(0, -2),
            self.values.t(),
            scale_a=tokens.scale.flatten(0, -2),
            scale_b=self.scale.t(),
            bias=self.bias,
            out_dtype=self.bias.dtype,
            use_fast_accum=True,
        )
        split: Tensor = product.unflatten(0, shape)
        return split


KINDS: dict[str, type[Int8Linear] | type[Float8Linear]] = {"int8": Int8Linear, "fp8": Float8Linear}


def quantise(backbone: Backbone, precision: str, notice: Notice = lambda line: None) -> None:
    """Replace the linear layers of a backbone's blocks by those of a precision; "full" changes nothing."""
    if precision == "full":
        return
    if not isinstance(backbone, WanBackbone):
        raise refuse_family(precision, backbone.spec.name)
    before = count_bytes(backbone.model)
    for block in backbone.model.layers():
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                owner, _, own_name = name.rpartition(".")
                setattr(block.get_submodule(owner), own_name, KINDS[precision].of(layer))
    after = count_bytes(backbone.model)
    notice(f"precision {precision}: the transformer takes {after / 1e6:.0f} MB instead of {before / 1e6:.0f}")


def refuse_family(precision: str, name: str) -> RecapError:
    """Return the error about a model that is not quantised."""
    limit = f"only the models of the Wan family are quantised, not {name}"
    return refuse("precision", precision, limit, "choose full")


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def join_linears(parts: Sequence[nn.Module]) -> Callable[[Tensor | Float8Tokens], Tensor]:
    """Return one layer that computes all parts, one after the other along the channels.

    The parts keep views of what is joined, so that nothing is stored twice.
    """
    first = parts[0]
    names = BUFFERS if isinstance(first, QuantisedLinear) else ("weight", "bias")
    joined = [torch.cat([getattr(part, name).detach() for part in parts]) for name in names]
    sizes = [len(getattr(part, names[-1])) for part in parts]
    for name, whole in zip(names, joined, strict=True):
        for part, own in zip(parts, whole.split(sizes), strict=True):
            getattr(part, name).data = own
    if isinstance(first, QuantisedLinear):
        return type(first)(*joined)
    return partial(functional.linear, weight=joined[0], bias=joined[1])
