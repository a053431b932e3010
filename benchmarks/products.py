"""Time the transformer's products, and what writes their inputs, in bf16, fp8 and int8.

Run it as `python -m benchmarks.products`. Each is 30 calls, one per layer, as one CUDA graph, with weights of several
layers so that they come from memory. Every kernel is first compared with float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.timing import describe_error, median_milliseconds, print_json
from recap.backbones.wan.quantised import Float8Linear, Int8Linear, quantise_tokens
from recap.backbones.wan.spec import WAN_1_3B
from recap.fast import dit, dit_kernels, float8_kernels
from recap.fast.float8_kernels import ProductTile
from recap.fast.graphs import Graphed

CALLS, SETS = WAN_1_3B.layers, 6
TILES = [
    ProductTile(128, 256, 128, 8, 4),
    ProductTile(128, 256, 128, 8, 3),
    ProductTile(256, 128, 128, 8, 4),
    ProductTile(128, 128, 128, 4, 3),
    ProductTile(128, 128, 128, 8, 3),
    ProductTile(128, 256, 64, 8, 5),
]


def time_calls(functions: list[Callable[[], object]]) -> float:
    """Return the milliseconds of as many calls as the model has layers, replayed as one graph."""

    def work(_: Tensor) -> None:
        for call in range(CALLS):
            functions[call % len(functions)]()

    graphed, nothing = Graphed(work), torch.zeros(1, device="cuda")
    for _ in range(2):
        graphed(nothing)
    return median_milliseconds(lambda: graphed(nothing), 10)


def relative(found: Tensor, meant: Tensor) -> float:
    return float((found.float() - meant.float()).norm() / meant.float().norm())


def widths(tokens: int) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the six products."""
    dim, wide = WAN_1_3B.dim, WAN_1_3B.ffn_dim
    square = (dim, dim)
    return {"qkv": (dim, 3 * dim), "o, text q, text o": square, "up": (dim, wide), "down": (wide, dim)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4680)
    tokens = parser.parse_args().tokens
    torch.manual_seed(0)
    times: dict[str, float] = {}
    errors: dict[str, float | str] = {}

    def tell(name: str, make: Callable[[], list[Callable[[], object]]], check: Any = None) -> None:
        try:
            with torch.no_grad():
                functions = make()
                if check is not None:
                    errors[name] = relative(*check())
                times[name] = time_calls(functions)
            print(f"{name:<44}{times[name]:8.3f} ms  error {errors.get(name, '')}", flush=True)
        except Exception as error:
            errors[name] = describe_error(error)
            print(f"{name}: {errors[name]}", flush=True)

    for name, (inputs, outputs) in widths(tokens).items():
        layers = [nn.Linear(inputs, outputs, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
        x = torch.randn(1, tokens, inputs, device="cuda", dtype=torch.bfloat16)
        meant = functional.linear(x.float(), layers[0].weight.float(), layers[0].bias.float()).detach()
        plain = dit_kernels.widen if name == "up" else lambda x, layer: layer(x)
        tell(f"{name}, bf16", lambda p=plain, x=x, ls=layers: [partial(p, x, each) for each in ls])
        coded, eight = quantise_tokens(x), [Float8Linear.of(each) for each in layers]
        tell(
            f"{name}, fp8",
            lambda e=eight, c=coded: [partial(each, c) for each in e],
            lambda e=eight, c=coded, m=meant: (e[0](c), m),
        )
        whole = [Int8Linear.of(each) for each in layers]
        tell(
            f"{name}, int8",
            lambda p=plain, x=x, w=whole: [partial(p, x, each) for each in w],
            lambda x=x, w=whole, m=meant: (w[0](x), m),
        )
        if name == "up":
            tell(
                "up and its GELU, fp8, two kernels",
                lambda e=eight, c=coded: [partial(dit_kernels.widen, c, each) for each in e],
                lambda e=eight, c=coded, m=meant: (
                    dit_kernels.widen(c, e[0]).restore(),
                    functional.gelu(m, approximate="tanh"),
                ),
            )
            scale = float8_kernels.reach_of(eight[0])
            for tile in TILES:
                tell(
                    f"up and its GELU, fp8, one kernel {tuple(tile)}",
                    lambda e=eight, c=coded, s=scale, t=tile: [
                        partial(float8_kernels.widen, c, each, s, t) for each in e
                    ],
                    lambda e=eight, c=coded, s=scale, t=tile, m=meant: (
                        float8_kernels.widen(c, e[0], s, t).restore(),
                        functional.gelu(m, approximate="tanh"),
                    ),
                )
            wide = [torch.randn(1, tokens, outputs, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
            tell(
                "GELU and quantising",
                lambda w=wide: [partial(dit_kernels.quantise_tokens, each, gelu=True) for each in w],
                lambda w=wide: (
                    dit_kernels.quantise_tokens(w[0], gelu=True).restore(),
                    functional.gelu(w[0].float(), approximate="tanh"),
                ),
            )
        if name == "qkv":
            many = [torch.randn_like(x) for _ in range(SETS)]
            tell(
                "quantising",
                lambda m=many: [partial(dit_kernels.quantise_tokens, each) for each in m],
                lambda m=many: (dit_kernels.quantise_tokens(m[0]).restore(), m[0]),
            )
            affine = torch.randn(inputs, device="cuda"), torch.randn(inputs, device="cuda")
            for float8 in (False, True):
                tell(
                    f"norm, {'fp8' if float8 else 'bf16'}",
                    lambda m=many, a=affine, f=float8: [
                        partial(dit_kernels.norm, each, a, 1e-6, m[0], a[0], f) for each in m
                    ],
                )
            found = dit_kernels.norm(many[0], affine, 1e-6, many[1], affine[0], True)[1].restore()
            meant_norm = dit.norm(many[0].float(), affine, 1e-6, many[1].float(), affine[0])[1]
            errors["norm, fp8"] = relative(found, meant_norm)
    print_json("products", "cuda", {"tokens": tokens, "ms": times, "errors": errors})


if __name__ == "__main__":
    main()
