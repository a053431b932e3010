"""A public row at its real size, without its weights: `python -m benchmarks.wan [--row self-forcing] [--blocks 20]`

Speed does not depend on values, so a checkpoint of random ones is written in the published layout and read by the
normal loader. Text is a random embedding and pictures come from the tiny decoder, also random: no extra is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from recap.backbones.wan.backbone import draw_weights
from recap.backbones.wan.family import WanConfig
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import WanSpec
from recap.backbones.wan.taehv import Taehv
from recap.config import DTYPES, Choice, RunConfig
from recap.plan import Shot, make_plan
from recap.registry import BACKBONES
from recap.rollout import rollout
from recap.run import build_backbone, build_memory


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

    blocks: int = 20
    memory: str = "recap"
    flow: str = "classical"
    device: str = "cpu"
    dtype: str = "float32"


def write_published(spec: WanSpec, folder: Path) -> dict[str, str]:
    """Random weights of a row, as its authors would have published them; returns the settings that name them."""
    with torch.device("meta"):
        model = CausalWan(spec)
    model = model.to_empty(device="cpu")
    draw_weights(model, 0)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"generator_ema": state, "generator": state}, folder / "checkpoint.pt")
    save_file(Taehv().state_dict(), folder / "taew2_1.safetensors")
    torch.save(torch.randn(1, spec.text_len, spec.text_dim), folder / "embeds.pt")
    return {
        "checkpoint": str(folder / "checkpoint.pt"),
        "decoder": "tiny",
        "tiny_decoder": str(folder / "taew2_1.safetensors"),
        "prompt_embeds": str(folder / "embeds.pt"),
    }


def measure(kind: type[WanConfig], settings: Settings, folder: Path) -> dict[str, object]:
    """Write, load and draw; seconds of each, and what was held."""
    began = time.perf_counter()
    files = write_published(kind.row, folder)
    written = time.perf_counter()
    chosen = kind(**files)  # type: ignore[arg-type]
    spec = chosen.spec.backbone_spec()
    length = settings.blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    memory = RunConfig.from_dict(
        {"shots": [{"prompt": "", "seconds": 1.0}], "memory": settings.memory}
    ).memory
    config = RunConfig(
        shots=(Shot("", length),),
        backbone=Choice(kind.row.name, chosen),
        memory=memory,
        flow=settings.flow,
        device=settings.device,
        dtype=settings.dtype,
    )
    backbone = build_backbone(config)
    loaded = time.perf_counter()
    plan = make_plan([config.shots], backbone.spec)
    seconds, pictures, last = [], 0, loaded
    for made in rollout(backbone, build_memory(config, backbone.spec), plan, seeds=[0]):
        finite = bool(
            made.latents.isfinite().all()
        )  # waits for the device, so that the time is the block's own
        assert finite, f"block {made.block.index} is not finite"
        now = time.perf_counter()
        seconds.append(now - last)
        pictures, last = pictures + made.pixels.shape[1], now
    cuda = settings.device.startswith("cuda")
    return {
        "row": kind.row.name,
        **{name: getattr(settings, name) for name in Settings.__slots__},
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "pictures": pictures,
        "write_s": written - began,
        "load_s": loaded - written,
        "first_block_s": seconds[0],
        "block_s_median": statistics.median(seconds[3:] or seconds),
        "last_to_early": statistics.median(seconds[-5:]) / statistics.median(seconds[3:8] or seconds),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    rows = [name for name, kind in BACKBONES.items() if issubclass(kind, WanConfig)]
    parser.add_argument("--row", choices=rows, default=rows[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--memory", default="recap")
    parser.add_argument("--flow", default="classical")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16" if cuda else "float32")
    given = vars(parser.parse_args())
    kind = BACKBONES[given.pop("row")]
    assert issubclass(kind, WanConfig)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(kind, Settings(**given), Path(folder))
    print(json.dumps({"bench": "wan", "torch": torch.__version__, **result}))


if __name__ == "__main__":
    main()
