"""Time the decoders at full size, with random weights: `python3 -m benchmarks.vae [--plain] [--layers]`

It compares the Wan VAE on the fast path with the tiny decoder in its readable form and on the fast path; `--plain`
adds the Wan VAE without our kernels. Errors are relative to fp32. `--layers` instead times every tile that the VAE's
convolutions can use. It also runs on the CPU, with `--size small`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.timing import describe_error, milliseconds, print_json
from recap.backbones.wan.taehv import Taehv
from recap.contracts import Decoder
from recap.fast.taehv import FastTaehv
from recap.fast.vae import PAST, CausalConv, FastVae
from recap.fast.vae_kernels import THIN, WIDE, Tile, shifted, tile_for

WARM_UP = 3
"""Warm-up blocks: the start of a video, one that runs eagerly, one that is recorded as a graph and replayed."""

NUM_KERNELS = 14
"""A profile lists this many kernels."""

RELEASED_MS = 248.0
"""The time of the released code of the Wan VAE on an H200, in bf16."""


class Size(NamedTuple):
    """The size of a block of latents; `width` is the number of channels of the VAE's last stage."""

    width: int
    rows: int
    columns: int
    frames: int = 3
    channels: int = 16


# Tiles to try where 64 divides the input channels, where only 32 does, and where there are very few outputs.
WIDE_TILES = (
    Tile(256, 128, 0, 64, 8, 4),
    Tile(128, 128, 0, 64, 4, 4),
    Tile(128, 128, 64, 64, 8, 4),
    Tile(256, 128, 64, 64, 8, 3),
)
NARROW_TILES = (
    Tile(256, 64, 32, 32, 8, 5),
    Tile(128, 64, 32, 32, 4, 6),
    Tile(128, 128, 0, 32, 4, 6),
    Tile(256, 128, 0, 32, 8, 5),
)
THIN_TILES = (Tile(256, 16, 0, 32, 4, 6), Tile(128, 16, 0, 32, 4, 6), Tile(256, 16, 0, 32, 8, 5))

SIZES = {"full": Size(96, 60, 104), "small": Size(8, 4, 6)}


class VaeSettings(NamedTuple):
    """Sets what one measurement runs."""

    size: Size
    device: torch.device
    blocks: int
    profiled: bool = False


OpenDecoder = Callable[[torch.dtype], Decoder]
"""A function that opens a fresh stream in some precision."""


class Variant(NamedTuple):
    """A decoder to measure in `half` precision; its errors are relative to `exact` in fp32."""

    name: str
    opened: OpenDecoder
    exact: OpenDecoder
    half: torch.dtype


def random_vae(settings: VaeSettings) -> FastVae:
    """Make the VAE's decoder with fixed random weights that keep features at about unit size."""
    size = settings.size
    network = FastVae(size.width, size.channels).to(settings.device).requires_grad_(False)
    generator = torch.Generator(settings.device).manual_seed(0)
    for name, tensor in network.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, device=settings.device)
        scale = tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1
        # Rounded before anything is derived from them, so that only the arithmetic differs.
        tensor.copy_((scale * noise + float(name.endswith("gamma"))).to(torch.bfloat16))
    return network


def random_tiny(settings: VaeSettings, dtype: torch.dtype) -> Taehv:
    """Make the tiny decoder with fixed random weights."""
    model = Taehv().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.copy_((scale * noise).to(torch.float16))
    return model.to(settings.device, dtype)


def variants(settings: VaeSettings, plain: bool) -> Iterator[Variant]:
    def unfused(dtype: torch.dtype) -> Decoder:
        return random_vae(settings).arrange(dtype, fused=False).open_decoder()

    def fast(dtype: torch.dtype) -> Decoder:
        return random_vae(settings).arrange(dtype).open_decoder()

    def readable_tiny(dtype: torch.dtype) -> Decoder:
        return random_tiny(settings, dtype).open_decoder()

    def fast_tiny(dtype: torch.dtype) -> Decoder:
        return FastTaehv(random_tiny(settings, dtype)).open_decoder()

    if plain:
        yield Variant("vae plain", unfused, unfused, torch.bfloat16)
    yield Variant("vae fast", fast, unfused, torch.bfloat16)
    yield Variant("tiny plain", readable_tiny, readable_tiny, torch.float16)
    yield Variant("tiny fast", fast_tiny, readable_tiny, torch.float16)


def warm_up_blocks(settings: VaeSettings) -> list[Tensor]:
    size = settings.size
    generator = torch.Generator(settings.device).manual_seed(1)
    shape = (1, size.frames, size.channels, size.rows, size.columns)
    return [torch.randn(shape, generator=generator, device=settings.device) for _ in range(WARM_UP)]


def decode_exactly(settings: VaeSettings, variant: Variant) -> list[Tensor]:
    """Decode the warm-up blocks in fp32, without tf32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        stream = variant.exact(torch.float32)
        return [stream.decode(block).cpu() for block in warm_up_blocks(settings)]


def measure(settings: VaeSettings, variant: Variant, expected: list[Tensor]) -> dict[str, object]:
    cuda = settings.device.type == "cuda"
    _clear(cuda)
    began = time.perf_counter()
    stream = variant.opened(variant.half if cuda else torch.float32)
    blocks = warm_up_blocks(settings)
    pieces = [stream.decode(block).cpu() for block in blocks]
    warm = time.perf_counter() - began
    peak = torch.cuda.max_memory_reserved() if cuda else 0
    taken = sorted(milliseconds(stream.decode, blocks[1 + index % 2]) for index in range(settings.blocks))
    if settings.profiled:
        print(*_kernels(lambda: stream.decode(blocks[1])), sep="\n")
    return {
        "decoder": variant.name,
        "ms": statistics.median(taken),
        "ms_p90": taken[round(0.9 * (len(taken) - 1))],
        "warm_s": warm,
        "peak_gb": peak / 1e9,
        "reserved_gb": torch.cuda.memory_reserved() / 1e9 if cuda else 0.0,
        **_errors(pieces, expected),
    }


def _errors(pieces: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Compute the errors as shares of the largest value and of the root mean square around the mean."""
    exact = torch.cat(expected, dim=1)
    error = torch.cat(pieces, dim=1) - exact
    exact = exact - exact.mean()
    return {
        "error_max": (error.abs().max() / exact.abs().max()).item(),
        "error_rms": (error.norm() / exact.norm()).item(),
    }


def _kernels(run: Callable[[], object]) -> list[str]:
    """List the kernels of a block, the longest first."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        f"{e.self_device_time_total / 1e3:.2f} ms in {e.count} {e.key[:90]}" for e in events[:NUM_KERNELS]
    ]


def _clear(cuda: bool) -> None:
    """Free the memory of the previous variant."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def decoders(settings: VaeSettings, plain: bool) -> Iterator[dict[str, object]]:
    """Measure every variant; a failure is reported, and the others are still measured."""
    exact: dict[OpenDecoder, list[Tensor]] = {}
    for variant in variants(settings, plain):
        try:
            if variant.exact not in exact:
                exact[variant.exact] = decode_exactly(settings, variant)
            yield measure(settings, variant, exact[variant.exact])
        except Exception as error:
            yield {"decoder": variant.name, "failed": describe_error(error)}


def layers(settings: VaeSettings) -> Iterator[dict[str, object]]:
    """Time every shape of the 3 x 3 x 3 convolutions with every tile and with cuDNN."""
    size, cuda = settings.size, settings.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    network = FastVae(size.width, size.channels)
    seen = set()
    for conv, past in zip(network.convs, network.pasts((1, size.rows, size.columns)), strict=True):
        # Only the first two stages double the number of frames.
        frames = size.frames * min(conv.scale, 4)
        shape = (1, frames + PAST, past[2] + 2, past[3] + 2, conv.channels)
        out = len(conv.weight)
        if conv.side == 1 or (shape, out) in seen:
            continue
        seen.add((shape, out))
        flops = 2 * conv.weight.numel() * frames * past[2] * past[3]
        for name, way in _ways(conv, torch.randn(shape, device=settings.device, dtype=dtype)):
            about: dict[str, object] = {"layer": f"{conv.channels}>{out} {shape[1:4]}", "way": name}
            try:
                # The first call compiles.
                way()
                taken = min(milliseconds(way) for _ in range(5))
                yield {**about, "ms": taken, "tflops": flops / taken / 1e9}
            except Exception as error:
                yield {**about, "failed": describe_error(error)}


def candidates(channels: int, out: int) -> tuple[Tile, ...]:
    """Return the tiles that a convolution can use; none if its channels do not fill them."""
    if tile_for(channels, out) is None:
        return ()
    if out == THIN.columns:
        return THIN_TILES
    return NARROW_TILES if channels % WIDE.depth else WIDE_TILES


def _ways(conv: CausalConv, x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    weight = torch.randn(conv.weight.shape, device=x.device).to(x.dtype)
    cubes = weight.contiguous(memory_format=torch.channels_last_3d)
    yield "cuDNN" if x.is_cuda else "conv3d", lambda: functional.conv3d(x.permute(0, 4, 1, 2, 3), cubes)
    flat = weight.permute(0, 2, 3, 4, 1).flatten(1).contiguous()
    out = len(weight)
    for tile in candidates(conv.channels, out):
        chosen = " (chosen)" if tile == tile_for(conv.channels, out) else ""
        yield f"{tuple(tile)}{chosen}", lambda tile=tile: shifted(x, flat, tile)  # type: ignore[misc]


def _line(found: dict[str, object]) -> str:
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in found.values()]
    first, *others = texts
    return "  ".join([f"{first:<28}", *(f"{n} {t}" for n, t in zip(list(found)[1:], others, strict=True))])


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="also time the VAE without kernels and graphs")
    parser.add_argument(
        "--layers", action="store_true", help="time the tiles of the VAE's convolutions instead"
    )
    parser.add_argument("--size", choices=list(SIZES), default="full" if cuda else "small")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a block, on CUDA")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if cuda else "cpu")
    settings = VaeSettings(SIZES[options.size], device, options.blocks, options.profile and cuda)
    results = []
    with torch.no_grad():
        for found in layers(settings) if options.layers else decoders(settings, options.plain):
            results.append(found)
            print(_line(found), flush=True)
    print_json("vae", device.type, {"released_ms": RELEASED_MS, "size": options.size, "results": results})


if __name__ == "__main__":
    main()
