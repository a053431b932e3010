"""The decoders at their real size, with random weights: `python3 -m benchmarks.vae [--plain] [--layers]`

Rows: the Wan VAE on the fast path, and the tiny decoder as its readable model has it and on the fast path; with
`--plain` also the Wan VAE without kernels of ours. Errors are those against fp32. `--layers` times every tile that
the VAE's convolutions can be made of instead. Runs on the CPU too, at `--size small`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recap.backbones.wan.taehv import Taehv
from recap.contracts import Decoder
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastDecoder, FastVae
from recap.fast.vae_kernels import candidates, shifted, tile_for
from recap.fast.vae_layers import PAST, CausalConv

WARM = 3  # blocks: a video's beginning, one that is played, one that is recorded and replayed
SHOWN = 14  # kernels of a profile
RELEASED_MS = 248.0  # of the released code of the Wan VAE, on an H200, in bf16


class Size(NamedTuple):
    width: int  # channels of the VAE's last stage
    rows: int
    columns: int
    frames: int = 3  # of a block
    channels: int = 16


SIZES = {"full": Size(96, 60, 104), "small": Size(8, 4, 6)}


class Settings(NamedTuple):
    size: Size
    device: torch.device
    blocks: int
    profiled: bool = False


Opened = Callable[[torch.dtype], Decoder]
"""Of a fresh stream in some precision."""


class Row(NamedTuple):
    name: str
    opened: Opened
    exact: Opened  # what its errors are against, in fp32
    half: torch.dtype


def drawn(settings: Settings) -> FastDecoder:
    """The VAE's decoder with random weights, the same at every call, that keep features at about unit size."""
    network = (
        FastDecoder(settings.size.width, settings.size.channels).to(settings.device).requires_grad_(False)
    )
    generator = torch.Generator(settings.device).manual_seed(0)
    for name, tensor in network.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, device=settings.device)
        scale = tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1
        # Rounded before anything is derived of them: what then differs is the arithmetic.
        tensor.copy_((scale * noise + float(name.endswith("gamma"))).to(torch.bfloat16))
    return network


def tiny(settings: Settings, dtype: torch.dtype) -> Taehv:
    """The tiny decoder, likewise."""
    model = Taehv().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.copy_((scale * noise).to(torch.float16))
    return model.to(settings.device, dtype)


def rows(settings: Settings, plain: bool) -> Iterator[Row]:
    def unfused(dtype: torch.dtype) -> Decoder:
        return FastVae(drawn(settings), dtype, fused=False).open_decoder()

    def fast(dtype: torch.dtype) -> Decoder:
        return FastVae(drawn(settings), dtype).open_decoder()

    def readable_tiny(dtype: torch.dtype) -> Decoder:
        return tiny(settings, dtype).open_decoder()

    def fast_tiny(dtype: torch.dtype) -> Decoder:
        return FastTaehv(tiny(settings, dtype)).open_decoder()

    if plain:
        yield Row("vae plain", unfused, unfused, torch.bfloat16)
    yield Row("vae fast", fast, unfused, torch.bfloat16)
    yield Row("tiny plain", readable_tiny, readable_tiny, torch.float16)
    yield Row("tiny fast", fast_tiny, readable_tiny, torch.float16)


def video(settings: Settings) -> list[Tensor]:
    """As many blocks as the warm-up has."""
    size = settings.size
    generator = torch.Generator(settings.device).manual_seed(1)
    shape = (1, size.frames, size.channels, size.rows, size.columns)
    return [torch.randn(shape, generator=generator, device=settings.device) for _ in range(WARM)]


def exact(settings: Settings, row: Row) -> list[Tensor]:
    """The warm-up's pictures in fp32, none of it rounded to tf32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        stream = row.exact(torch.float32)
        return [stream.decode(block).cpu() for block in video(settings)]


def measure(settings: Settings, row: Row, expected: list[Tensor]) -> dict[str, object]:
    cuda = settings.device.type == "cuda"
    _clear(cuda)
    began = time.perf_counter()
    stream = row.opened(row.half if cuda else torch.float32)
    blocks = video(settings)
    pieces = [stream.decode(block).cpu() for block in blocks]
    warm = time.perf_counter() - began
    peak = torch.cuda.max_memory_reserved() if cuda else 0
    taken = sorted(milliseconds(stream.decode, blocks[1 + index % 2]) for index in range(settings.blocks))
    if settings.profiled:
        print(*_kernels(lambda: stream.decode(blocks[1])), sep="\n")
    return {
        "decoder": row.name,
        "ms": statistics.median(taken),
        "ms_p90": taken[round(0.9 * (len(taken) - 1))],
        "warm_s": warm,
        "peak_gb": peak / 1e9,
        "held_gb": torch.cuda.memory_reserved() / 1e9 if cuda else 0.0,
        **_errors(pieces, expected),
    }


def _errors(pieces: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Of pictures around their mean, as a share of the largest value and of the root mean square."""
    exact = torch.cat(expected, dim=1)
    apart = torch.cat(pieces, dim=1) - exact
    exact = exact - exact.mean()
    return {
        "error_max": (apart.abs().max() / exact.abs().max()).item(),
        "error_rms": (apart.norm() / exact.norm()).item(),
    }


def milliseconds(function: Callable[..., object], *given: object) -> float:
    """Of one call, on the device's own clock where there is a device."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function(*given)
        return 1e3 * (time.perf_counter() - start)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    function(*given)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _kernels(run: Callable[[], object]) -> list[str]:
    """What the device spends a block on, the longest first."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        run()
        torch.cuda.synchronize()
    spent = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:SHOWN]
    return [
        f"{event.self_device_time_total / 1e3:.2f} ms in {event.count} {event.key[:90]}" for event in spent
    ]


def _clear(cuda: bool) -> None:
    """One row must not pay for what another left behind."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def decoders(settings: Settings, plain: bool) -> Iterator[dict[str, object]]:
    known: dict[Opened, list[Tensor]] = {}
    for row in rows(settings, plain):
        try:
            if row.exact not in known:
                known[row.exact] = exact(settings, row)
            yield measure(settings, row, known[row.exact])
        except Exception as problem:  # one that fails says so, and the others are still worth knowing
            yield {"decoder": row.name, "failed": _told(problem)}


def layers(settings: Settings) -> Iterator[dict[str, object]]:
    """Every shape of the 3 x 3 x 3 convolutions, by every tile and by cuDNN: milliseconds, and TFLOP/s."""
    size, cuda = settings.size, settings.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    network = FastDecoder(size.width, size.channels)
    seen = set()
    for conv, past in zip(network.convs, network.pasts((1, size.rows, size.columns)), strict=True):
        frames = size.frames * min(conv.scale, 4)  # time doubles with the first two stages alone
        shape = (1, frames + PAST, past[2] + 2, past[3] + 2, conv.channels)
        out = len(conv.weight)
        if conv.side == 1 or (shape, out) in seen:
            continue
        seen.add((shape, out))
        flops = 2 * conv.weight.numel() * frames * past[2] * past[3]
        for name, way in _ways(conv, torch.randn(shape, device=settings.device, dtype=dtype)):
            row: dict[str, object] = {"layer": f"{conv.channels}>{out} {shape[1:4]}", "way": name}
            try:
                way()  # compiles
                taken = min(milliseconds(way) for _ in range(5))
                yield {**row, "ms": taken, "tflops": flops / taken / 1e9}
            except Exception as problem:
                yield {**row, "failed": _told(problem)}


def _ways(conv: CausalConv, x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    weight = torch.randn(conv.weight.shape, device=x.device).to(x.dtype)
    cubes = weight.contiguous(memory_format=torch.channels_last_3d)
    yield "cuDNN" if x.is_cuda else "conv3d", lambda: functional.conv3d(x.permute(0, 4, 1, 2, 3), cubes)
    flat = weight.permute(0, 2, 3, 4, 1).flatten(1).contiguous()
    out = len(weight)
    for tile in candidates(conv.channels, out):
        chosen = " (chosen)" if tile == tile_for(conv.channels, out) else ""
        yield f"{tuple(tile)}{chosen}", lambda tile=tile: shifted(x, flat, tile)  # type: ignore[misc]


def _told(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip()[:300]}"


def _line(row: dict[str, object]) -> str:
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
    first, *others = texts
    return "  ".join([f"{first:<28}", *(f"{n} {t}" for n, t in zip(list(row)[1:], others, strict=True))])


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="also the VAE without kernels and recordings")
    parser.add_argument("--layers", action="store_true", help="the tiles of the VAE's convolutions instead")
    parser.add_argument("--size", choices=list(SIZES), default="full" if cuda else "small")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a block, on CUDA")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if cuda else "cpu")
    settings = Settings(SIZES[given.size], device, given.blocks, given.profile and cuda)
    made = []
    with torch.no_grad():
        for row in layers(settings) if given.layers else decoders(settings, given.plain):
            made.append(row)
            print(_line(row), flush=True)
    chip = torch.cuda.get_device_name() if cuda else "cpu"
    about = {"bench": "vae", "torch": torch.__version__, "device": chip, "released_ms": RELEASED_MS}
    print(json.dumps({**about, "size": given.size, "rows": made}))


if __name__ == "__main__":
    main()
