"""The Wan VAE's decoder at its real size, with random weights: `python3 -m recap.bench.vae [--variants a,b]`

A variant is words joined by `+`: one kind of convolution (planar, conv3d, folded, summed, shifted) and any of
`subpixel` (enlarging without the enlarged picture), `kernels` (Triton between convolutions), `compiled`
(torch.compile over the whole step), `tuned` (cuDNN tries its algorithms) and `graph` (one CUDA graph a block).
`--layers` times the convolutions one by one instead. Runs on the CPU too, at `--size small`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recap.bench.vae_kernels import shifted
from recap.bench.vae_variants import CONVS, OPTIONS, ShiftedConv, fastest, milliseconds, parts_of, tiles_for
from recap.errors import unknown_name
from recap.fast.graphs import Graphed
from recap.fast.vae import ROOM, FastDecoder, FastVae
from recap.fast.vae_layers import PAST

DEFAULT = (
    "conv3d",
    "conv3d+tuned+graph",
    "summed+tuned+graph",
    "folded+tuned+graph",
    "conv3d+subpixel+kernels+tuned+graph",
    "shifted+subpixel+tuned+graph",
    "conv3d+subpixel+compiled+tuned+graph",
)
SHOWN = 14  # kernels of a profile
RELEASED_MS = 248.0  # the released code, on the same chip, in bf16


class Size(NamedTuple):
    width: int  # channels of the last stage
    rows: int
    columns: int
    frames: int = 3  # of a block
    channels: int = 16


SIZES = {"full": Size(96, 60, 104), "small": Size(8, 4, 6)}


class Settings(NamedTuple):
    size: Size
    device: str
    dtype: torch.dtype
    blocks: int
    profiled: bool = False


def drawn(size: Size, words: set[str], device: str, dtype: torch.dtype) -> FastVae:
    """The decoder with random weights, the same at every call, that keep features at about unit size."""
    network = FastDecoder(size.width, size.channels, parts_of(words)).to(device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in network.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, device=device)
        if tensor.dim() > 1:
            noise /= tensor[0].numel() ** 0.5
        # Rounded before anything is derived of them: what then differs is the arithmetic of a variant.
        made = (1 + 0.1 * noise) if name.endswith("gamma") else noise if tensor.dim() > 1 else 0.1 * noise
        tensor.copy_(made.to(torch.bfloat16))
    return FastVae(network, dtype)


def video(settings: Settings, blocks: int) -> list[Tensor]:
    size = settings.size
    generator = torch.Generator(settings.device).manual_seed(1)
    shape = (1, size.frames, size.channels, size.rows, size.columns)
    return [torch.randn(shape, generator=generator, device=settings.device) for _ in range(blocks)]


@contextmanager
def choosing(tuned: bool) -> Iterator[None]:
    """Whether cuDNN times its algorithms; nothing rounds to tf32, which the reference must not do."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=tuned, deterministic=False, allow_tf32=False):
        yield


def stepper(vae: FastVae, words: set[str], pasts: list[Tensor]) -> Callable[[Tensor], Tensor]:
    step = torch.compile(vae.network, dynamic=False) if "compiled" in words else vae.network

    def run(latents: Tensor) -> Tensor:
        made: Tensor = step(latents, pasts, False)
        return made

    return Graphed(run) if "graph" in words else run


def reference(settings: Settings) -> list[Tensor]:
    """Three blocks in fp32, plainly."""
    vae = drawn(settings.size, {"conv3d"}, settings.device, torch.float32)
    pasts = vae.network.pasts(1, settings.size.rows, settings.size.columns)
    with choosing(tuned=False):
        pieces = [vae.network(piece, pasts, index == 0) for index, piece in enumerate(video(settings, 3))]
    return [piece.cpu() for piece in pieces]


def measure(settings: Settings, words: set[str], expected: list[Tensor]) -> dict[str, float]:
    cuda = settings.device.startswith("cuda")
    _clear(cuda)
    began = time.perf_counter()
    vae = drawn(settings.size, words, settings.device, settings.dtype)
    pasts = vae.network.pasts(1, settings.size.rows, settings.size.columns)
    step = stepper(vae, words, pasts)
    blocks = video(settings, len(expected))
    pieces, taken = [], []
    # The first blocks are also the warm-up: a video's beginning, one that is played, one recorded and replayed.
    with choosing(tuned=False):  # a video's beginning has shapes of its own, once
        pieces.append(vae.network(blocks[0], pasts, True).cpu())
    with choosing("tuned" in words):
        pieces += [step(block).cpu() for block in blocks[1:]]
        warm = time.perf_counter() - began
        for index in range(settings.blocks):
            taken.append(milliseconds(step, blocks[1 + index % (len(blocks) - 1)]))
        if settings.profiled:
            print(*_kernels(lambda: step(blocks[1])), sep="\n")
    ordered = sorted(taken)
    return {
        "ms": statistics.median(taken),
        "ms_p90": ordered[round(0.9 * (len(ordered) - 1))],
        "warm_s": warm,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else 0.0,
        **_errors(pieces, expected),
    }


def _errors(pieces: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Of pictures around 0, as a share of the largest value and of the root mean square."""
    exact = torch.cat(expected, dim=1) - 0.5
    apart = torch.cat(pieces, dim=1) - 0.5 - exact
    return {
        "error_max": (apart.abs().max() / exact.abs().max()).item(),
        "error_rms": (apart.norm() / exact.norm()).item(),
    }


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
    """One variant must not pay for what another left behind."""
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def layers(settings: Settings) -> Iterator[dict[str, object]]:
    """Every shape of the 3 x 3 x 3 convolutions, in every way: milliseconds, and TFLOP/s."""
    network = drawn(settings.size, {"conv3d"}, settings.device, settings.dtype).network
    seen = set()
    pasts = network.pasts(1, settings.size.rows, settings.size.columns)
    for conv, past in zip(network.convs, pasts, strict=True):
        out = len(conv.weight)
        frames = settings.size.frames * min(conv.scale, 4)  # time doubles with the first two stages alone
        shape = (1, frames + PAST, *past.shape[2:])
        if conv.side == 1 or conv.place == 0 or out == ROOM or (shape, out) in seen:
            continue
        seen.add((shape, out))
        flops = 2 * conv.weight.numel() * frames * past.shape[2] * past.shape[3]
        x = torch.randn(shape, device=settings.device, dtype=settings.dtype)
        ways: dict[str, Callable[[], object]] = {}
        for name, kind in CONVS.items():
            twin = kind(conv.channels, out).to(settings.device, settings.dtype).requires_grad_(False)
            twin.weight.copy_(conv.weight)
            twin.arrange()
            if isinstance(twin, ShiftedConv):
                padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
                for tile in tiles_for(x):
                    ways[f"{name} {tuple(tile)}"] = _bound(shifted, padded, twin.flat, tile)
            else:
                ways[name] = _bound(twin, x)
        for name, way in ways.items():
            row: dict[str, object] = {"layer": f"{conv.channels}>{out} {tuple(shape[1:4])}", "way": name}
            try:
                with choosing(tuned=True):
                    taken = fastest(way, times=5)
                yield {**row, "ms": taken, "tflops": flops / taken / 1e9}
            except Exception as problem:  # one that fails says so, and the others are still worth knowing
                yield {**row, "failed": _told(problem)}
        del x, ways


def _bound(function: Callable[..., object], *given: object) -> Callable[[], object]:
    return lambda: function(*given)


def _told(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip()[:300]}"


def variants(settings: Settings, names: list[str], seconds: float) -> Iterator[dict[str, object]]:
    """A row per variant; those that the time does not reach are named as such."""
    began = time.perf_counter()
    expected = reference(settings)
    for name in names:
        if time.perf_counter() - began > seconds:
            yield {"variant": name, "failed": f"not begun within {seconds:.0f} s"}
            continue
        try:
            yield {"variant": name, **measure(settings, set(name.split("+")), expected)}
        except Exception as problem:
            yield {"variant": name, "failed": _told(problem)}


def _line(row: dict[str, object]) -> str:
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
    names = list(row)
    return "  ".join(
        f"{n} {t}" if i else f"{t:<40}" for i, (n, t) in enumerate(zip(names, texts, strict=True))
    )


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", default=",".join(DEFAULT))
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--size", choices=list(SIZES), default="full" if cuda else "small")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=130, help="after which no variant is begun")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a block, on CUDA")
    given = parser.parse_args(arguments)
    names = given.variants.split(",")
    for word in {word for name in names for word in name.split("+")} - {*CONVS, *OPTIONS}:
        raise unknown_name("variants", word, [*CONVS, *OPTIONS])
    dtype = torch.bfloat16 if cuda else torch.float32
    settings = Settings(
        SIZES[given.size], "cuda" if cuda else "cpu", dtype, given.blocks, given.profile and cuda
    )
    with torch.no_grad():
        rows = []
        for row in layers(settings) if given.layers else variants(settings, names, given.seconds):
            rows.append(row)
            print(_line(row), flush=True)
    chip = torch.cuda.get_device_name() if cuda else "cpu"
    about = {"bench": "vae", "torch": torch.__version__, "device": chip, "released_ms": RELEASED_MS}
    print(json.dumps({**about, "size": given.size, "rows": rows}))


if __name__ == "__main__":
    main()
