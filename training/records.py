"""The output of a training run: fp16 weights, a JSON record, contact sheets.

    python -m training.records DIR FOLDER                 joins the weights of a run in DIR into whole files
    python -m training.records DIR FOLDER --eight-bits    the same in half the size, for a run to resume from

Every file is written completely or not at all, so a killed run leaves its last good minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from recap.backbones.tiny.autoencoder import Autoencoder
from recap.errors import refuse
from recap.io.files import write_whole

PART_BYTES = 15 * 2**20
"""The largest weights file: the training machine returns at most 16 MiB per file."""

SCALE = ".row_scale"


class Record:
    """The settings and measurements of a run, printed at once and written as JSON."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "record.json"
        self._began = time.monotonic()
        self._content: dict[str, Any] = {"settings": dict(settings), "torch": torch.__version__, "lines": []}

    def add(self, event: str, **numbers: float | int | str | list[float]) -> None:
        """Add one line of measurements, with the seconds since the start."""
        line = {"s": round(time.monotonic() - self._began, 1), "event": event, **_rounded(numbers)}
        self._content["lines"].append(line)
        print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)

    def write(self) -> None:
        write_whole(self._path, json.dumps(self._content, indent=1).encode())


def _rounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {n: float(f"{v:.5g}") if isinstance(v, float) else v for n, v in numbers.items()}


def half_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors as they are shipped: contiguous fp16 on the CPU."""
    return {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in state.items()}


def save_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write fp16 weights; above PART_BYTES they are split into NAME-1.safetensors, NAME-2.safetensors and so on."""
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in half_state(state).items():
        size = tensor.numel() * tensor.element_size()
        if used + size > PART_BYTES and parts[-1]:
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        used += size
    if len(parts) == 1:
        write_whole(path, save(parts[0]))
        return
    for number, part in enumerate(parts, start=1):
        write_whole(path.with_stem(f"{path.stem}-{number}"), save(part))


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read what `save_weights` wrote under that name, in one file or in parts, as fp32."""
    parts = [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))
    if not parts:
        raise FileNotFoundError(f"{path}: no such weights, nor parts of them; train them or correct the path")
    try:
        stored = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    except SafetensorError as error:
        raise refuse("weights", str(path), f"cannot be read: {error}", "copy or train them again") from error
    return {
        name: tensor.float() * stored[name + SCALE].float() if name + SCALE in stored else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


def load_autoencoder(file: Path, device: torch.device | str) -> Autoencoder:
    """Load a trained autoencoder for inference."""
    autoencoder = Autoencoder()
    autoencoder.load_state_dict(load_weights(file))
    autoencoder.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return autoencoder.eval().requires_grad_(False)


def eight_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round matrices to integers in -127..127 with a scale per matrix row; the rest stays fp16.

    It changes the weights by under 1 % of their norm; a run of nine minutes changes them by about 7 %.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in half_state(state).items():
        if tensor.dim() < 2:
            made[name] = tensor
            continue
        rows = tuple(range(1, tensor.dim()))
        scale = (tensor.float().abs().amax(dim=rows, keepdim=True) / 127).clamp(min=1e-7).half()
        made[name] = (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        made[name + SCALE] = scale
    return made


def write_sheet(path: Path, pictures: Tensor) -> None:
    """Write pictures R C 3 Y X, 0..1, as one PNG of R rows and C columns."""
    rows, columns, _, height, width = pictures.shape
    grid = pictures.detach().float().clamp(0, 1).mul(255).round().to("cpu", torch.uint8).numpy()
    sheet = grid.transpose(0, 3, 1, 4, 2).reshape(rows * height, columns * width, 3)
    _, encoded = cv2.imencode(".png", np.ascontiguousarray(sheet[:, :, ::-1]))
    write_whole(path, encoded.tobytes())


def ship(run: Path, folder: Path, *, packed: bool = False) -> None:
    """Write the weights of a run into a folder, one whole file each, as the package loads them, or packed."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.stem.rpartition("-")[0] or path.stem for path in run.glob("*.safetensors")}
    for name in sorted(names):
        whole = load_weights(run / f"{name}.safetensors")
        content = save(eight_bits(whole) if packed else half_state(whole))
        write_whole(folder / f"{name}.safetensors", content)
        print(f"{name}.safetensors {len(content) / 1e6:.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Join the weights of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--eight-bits", action="store_true")
    options = parser.parse_args()
    ship(options.run, options.folder, packed=options.eight_bits)
