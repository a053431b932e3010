"""Time a public backbone at full size without its weights: `python -m benchmarks.wan [--row self-forcing]`

Speed does not depend on values, so random weights are written in the published layout and read by the normal loader.
Text is a random embedding, and the tiny decoder, also random, makes the pictures: no optional package is needed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.timing import next_block, print_json
from recap.backbones.wan.backbone import draw_weights
from recap.backbones.wan.family import WanConfig
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import WanSpec
from recap.backbones.wan.taehv import Taehv
from recap.config import DTYPES, Choice, RunConfig
from recap.plan import make_plan
from recap.registry import BACKBONES
from recap.rollout import rollout
from recap.run import build_backbone, build_memory


@dataclass(frozen=True, slots=True)
class WanSettings:
    """Sets what one measurement runs."""

    blocks: int = 20
    memory: str = "recap"
    flow: str = "classical"
    device: str = "cpu"
    dtype: str = "float32"


def write_published(spec: WanSpec, folder: Path) -> dict[str, str]:
    """Write random weights in the published layout of a backbone; return the settings that name the files."""
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


def measure(kind: type[WanConfig], settings: WanSettings, folder: Path) -> dict[str, object]:
    """Write and load the weights and generate a video; return the seconds of each and the peak memory."""
    began = time.perf_counter()
    files = write_published(kind.row, folder)
    written = time.perf_counter()
    chosen = kind(**files)  # type: ignore[arg-type]
    spec = chosen.spec.backbone_spec()
    length = settings.blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    shots = [{"prompt": "", "seconds": length}]
    names = {name: getattr(settings, name) for name in ("memory", "flow", "device", "dtype")}
    config = replace(RunConfig.from_dict({"shots": shots, **names}), backbone=Choice(kind.row.name, chosen))
    backbone = build_backbone(config)
    loaded = time.perf_counter()
    plan = make_plan([config.shots], backbone.spec)
    blocks = rollout(backbone, build_memory(config, backbone.spec), plan, seeds=[0])
    seconds, pictures = [], 0
    for _ in range(settings.blocks):
        made, taken = next_block(blocks)
        seconds.append(taken)
        pictures += made.pixels.shape[1]
    cuda = settings.device.startswith("cuda")
    return {
        "row": kind.row.name,
        **asdict(settings),
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
    options = vars(parser.parse_args())
    kind = BACKBONES[options.pop("row")]
    assert issubclass(kind, WanConfig)
    with tempfile.TemporaryDirectory() as folder:
        print_json("wan", options["device"], measure(kind, WanSettings(**options), Path(folder)))


if __name__ == "__main__":
    main()
