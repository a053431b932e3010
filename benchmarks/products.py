"""Time the transformer's products, and what writes their inputs, in bf16, fp8 and int8, on a GPU.

Run it as `python -m benchmarks.products`. Each time is of one call per layer of the 1.3B model, replayed as one CUDA
graph, with weights of several layers so that they come from memory. Every kernel is first compared with float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.timing import describe_error, median_milliseconds, print_json
from recap.backbones.wan.quantised import Float8Linear, Float8Tokens, Int8Linear, quantise_tokens
from recap.backbones.wan.spec import WAN_1_3B
from recap.fast import dit, dit_kernels
from recap.fast.graphs import Graphed
from recap.fast.quantised_kernels import ProductTile, widen_at_once

CALLS, SETS = WAN_1_3B.layers, 6
DIM, WIDE = WAN_1_3B.dim, WAN_1_3B.ffn_dim
PRODUCTS = {"qkv": (DIM, 3 * DIM), "o, text q or text o": (DIM, DIM), "up": (DIM, WIDE), "down": (WIDE, DIM)}
TILES = [
    ProductTile(128, 256, 128, 8, 3),
    ProductTile(128, 128, 128, 4, 3),
    ProductTile(128, 128, 128, 8, 3),
    ProductTile(128, 128, 128, 8, 4),
    ProductTile(128, 128, 64, 8, 4),
]

Call = Callable[[], object]


def time_calls(calls: Sequence[Call]) -> float:
    """Return the milliseconds of as many calls as the model has layers, replayed as one graph."""

    def work(_: Tensor) -> None:
        for call in range(CALLS):
            calls[call % len(calls)]()

    graphed, nothing = Graphed(work), torch.zeros(1, device="cuda")
    for _ in range(2):
        graphed(nothing)
    return median_milliseconds(lambda: graphed(nothing), 10)


class Measured:
    """Collects times, and the relative errors of what the calls return against float32."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.errors: dict[str, float | str] = {}

    def measure(self, name: str, calls: Sequence[Call], meant: Tensor) -> None:
        """Check the first call, time all on a GPU; what fails is noted, and the rest is measured."""
        try:
            found = calls[0]()
            plain = found.restore() if isinstance(found, Float8Tokens) else found
            assert isinstance(plain, Tensor)
            self.errors[name] = float((plain.float() - meant).norm() / meant.norm())
            if meant.is_cuda:
                self.ms[name] = time_calls(calls)
            took = f"{self.ms[name]:8.3f} ms" if name in self.ms else "not timed"
            print(f"{name:<60}{took}, error {self.errors[name]:.2e}", flush=True)
        except Exception as error:
            self.errors[name] = describe_error(error)
            print(f"{name}: {self.errors[name]}", flush=True)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measure_product(name: str, tokens: int, measured: Measured) -> None:
    """Time one of the layers; `up` together with its GELU."""
    inputs, outputs = PRODUCTS[name]
    layers = [nn.Linear(inputs, outputs, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    x = random(1, tokens, inputs)
    meant = functional.linear(x.float(), layers[0].weight.float(), layers[0].bias.float())
    coded, eight = quantise_tokens(x), [Float8Linear.of(layer) for layer in layers]
    whole = [Int8Linear.of(layer) for layer in layers]
    if name != "up":
        measured.measure(f"{name}, bf16", [partial(layer, x) for layer in layers], meant)
        measured.measure(f"{name}, int8", [partial(dit_kernels.linear, x, layer) for layer in whole], meant)
        measured.measure(f"{name}, fp8", [partial(layer, coded) for layer in eight], meant)
        return
    measured.measure("up without GELU, fp8", [partial(layer, coded) for layer in eight], meant)
    meant = functional.gelu(meant, approximate="tanh")
    measured.measure("up, bf16", [partial(dit_kernels.widen, x, layer) for layer in layers], meant)
    measured.measure("up, int8", [partial(dit_kernels.widen, x, layer) for layer in whole], meant)

    def in_two(layer: Float8Linear) -> Float8Tokens:
        return dit_kernels.quantise_tokens(layer(coded), gelu=True)

    measured.measure("up, fp8, two kernels", [partial(in_two, layer) for layer in eight], meant)
    for tile in TILES:
        calls = [partial(widen_at_once, coded, layer, tile) for layer in eight]
        measured.measure(f"up, fp8, one kernel {tuple(tile)}", calls, meant)


def measure_inputs(tokens: int, measured: Measured) -> None:
    """Time what writes the inputs of products."""
    for gelu, width in ((False, DIM), (True, WIDE)):
        wide = [random(1, tokens, width) for _ in range(SETS)]
        meant = functional.gelu(wide[0].float(), approximate="tanh") if gelu else wide[0].float()
        calls = [partial(dit_kernels.quantise_tokens, each, gelu=gelu) for each in wide]
        measured.measure(f"{'GELU and ' if gelu else ''}quantising {width}", calls, meant)
    many, gate = [random(1, tokens, DIM) for _ in range(SETS)], torch.randn(DIM, device="cuda")
    affine = torch.randn(DIM, device="cuda"), torch.randn(DIM, device="cuda")

    def norm(x: Tensor, float8: bool) -> Tensor | Float8Tokens:
        return dit_kernels.norm(x, affine, WAN_1_3B.eps, many[1], gate, float8)[1]

    meant_norm = dit.norm(many[0].float(), affine, WAN_1_3B.eps, many[1].float(), gate)[1]
    assert isinstance(meant_norm, Tensor)
    for float8 in (False, True):
        norms: list[Call] = [partial(norm, each, float8) for each in many]
        measured.measure(f"norm, {'fp8' if float8 else 'bf16'}", norms, meant_norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4680, help="of a block")
    tokens = parser.parse_args().tokens
    torch.manual_seed(0)
    measured = Measured()
    with torch.no_grad():
        measure_inputs(tokens, measured)
        for name in PRODUCTS:
            measure_product(name, tokens, measured)
    print_json("products", "cuda", {"tokens": tokens, "ms": measured.ms, "errors": measured.errors})


if __name__ == "__main__":
    main()
