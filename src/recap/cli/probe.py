"""`recap probe` looks at a model's keys and heads: how would a rule by keys, and a sink, work on it?"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from recap.backbones.helios.family import HeliosConfig
from recap.cli.console import progress_bar
from recap.cli.options import Device, Dtype, Eager, Flow, LowMemory, ModelName, Precision, RandomWeights
from recap.errors import refuse
from recap.io.files import write_whole
from recap.show.models import ModelChoice
from recap.show.probing import ProbeSettings, probe, refuse_carried

FEW = 0.1
"""Of what flow notices, a rule that calls less than this share new is of little use."""


def probe_command(
    name: ModelName = "embedded",
    out: Annotated[Path | None, typer.Option(help="The file to write [default: probe-NAME.json].")] = None,
    before: Annotated[str, typer.Option(help="The scene without the subject.")] = ProbeSettings().before,
    after: Annotated[str, typer.Option(help="The same scene with it.")] = ProbeSettings().after,
    blocks: Annotated[int, typer.Option(help="Blocks of each.")] = ProbeSettings().blocks,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    random_weights: RandomWeights = False,
    flow: Flow = None,
    device: Device = None,
    dtype: Dtype = None,
    precision: Precision = None,
    eager: Eager = False,
    low_memory: LowMemory = None,
) -> None:
    """Measure a model's keys and heads, for a small file to publish.

    A scene is generated, then the same scene with a subject. Measured are how far new tokens are from the first
    frame, by the model's own keys in every layer, what the rule `keys` would choose, and how much each head looks
    at the sink.
    """
    settings = ProbeSettings(before, after, blocks, seed)
    chosen = ModelChoice.of(
        name, random_weights=random_weights, decoder="tiny", flow=flow,
        device=device, dtype=dtype, precision=precision, eager=eager, low_memory=low_memory,
    )  # fmt: skip
    if isinstance(chosen.config.backbone.settings, HeliosConfig):
        # Before its 14B weights are loaded.
        raise refuse_carried(name)
    path = out or Path(f"probe-{name.replace(':', '-')}.json")
    if path.is_dir():
        raise refuse("--out", str(path), "is a folder", "name a file")
    began = time.perf_counter()
    with progress_bar("probing", "blocks", "loading the model") as reporter:
        chosen = chosen.fit(reporter.notice)
        parts = chosen.load((before, after), reporter.notice)
        made = probe(parts.backbone, parts.flow, settings, reporter)
    device_name = chosen.config.device
    gpu = torch.cuda.get_device_name(device_name) if device_name.startswith("cuda") else platform.machine()
    result: dict[str, Any] = {
        "backbone": name,
        "weights": parts.about["weights"],
        "flow": parts.about["flow"],
        "device": gpu,
        "dtype": chosen.config.dtype,
        "precision": chosen.config.precision,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.perf_counter() - began, 1),
        **made,
    }
    write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
    typer.echo(_summary(result))
    typer.echo(path)


def _summary(result: dict[str, Any]) -> str:
    """Return a line per layer, and one about the rule."""
    lines = [
        "layer  background 5 %  median   new median  95 %   told apart   sink's share: least, most of the heads"
    ]

    def shown(value: float | None) -> str:
        return "   -  " if value is None else f"{value:6.3f}"

    for index, layer in enumerate(result["layers"]):
        background, new = (layer["cosine_to_sink"][kind] for kind in ("background", "new"))
        heads = layer["share_by_head"].get("sink") or [None]
        figures = (background["5"], background["50"], new["50"], new["95"], layer["told_apart"])
        lines.append(f"{index:5d}  " + "   ".join(map(shown, (*figures, min(heads), max(heads)))))
    rule, called = result["keys_rule"], result["keys_rule"]["called_new"]
    lines.append(
        f"`keys` compares layers {', '.join(map(str, rule['compared_layers']))} and calls new what is farther than"
        f" {rule['new_beyond_distance']}: {shown(called['background']).strip()} of the background,"
        f" {shown(called['new']).strip()} of what flow notices after the change"
    )
    middle, usual = rule["distances"]["new"]["50"], rule["usual_distance"]
    if called["new"] is not None and called["new"] < FEW and middle and usual:
        lines.append(
            f"That is next to nothing: with `--set admission.margin={middle / usual:.2g}`, not {rule['margin']:g},"
            " half of it would be new; or choose `--memory recap`, whose bank is filled by flow"
        )
    return "\n".join(lines)
