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
from recap.backbones.wan.family import WanConfig
from recap.cli.console import progress_bar
from recap.cli.options import Device, Dtype, Eager, Flow
from recap.config import DTYPES, Choice, check_place, choose, resolve_device, resolve_dtype
from recap.contracts import Backbone, BackboneConfig
from recap.errors import refuse
from recap.fast.accelerate import accelerate, accelerate_flow
from recap.fast.speed import SpeedSettings, make_parts
from recap.flow import build_flow, resolve_flow
from recap.io.files import write_whole
from recap.io.report import Notice
from recap.show.probing import ProbeSettings, probe, refuse_carried


def probe_command(
    name: Annotated[str, typer.Argument(help="Which model; see `recap list backbones`.")] = "embedded",
    out: Annotated[Path | None, typer.Option(help="The file to write [default: probe-NAME.json].")] = None,
    before: Annotated[str, typer.Option(help="The scene without the subject.")] = ProbeSettings().before,
    after: Annotated[str, typer.Option(help="The same scene with it.")] = ProbeSettings().after,
    blocks: Annotated[int, typer.Option(help="Blocks of each.")] = ProbeSettings().blocks,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="A public model at real size without its weights.")
    ] = False,
    flow: Flow = None,
    device: Device = None,
    dtype: Dtype = None,
    eager: Eager = False,
) -> None:
    """Measure a model's keys and heads, for a small file to publish.

    A scene is generated, then the same scene with a subject: how far is what is new from the first frame, by the
    model's own keys, layer by layer; what would the rule `keys` choose; how much does every head look at the sink?
    """
    settings = ProbeSettings(before, after, blocks, seed)
    chosen: Choice[BackboneConfig] = choose("backbone", name)
    place = resolve_device("auto" if device is None else device)
    precision = resolve_dtype("auto" if dtype is None else dtype, place, type(chosen.settings))
    check_place(place, precision)
    path = out or Path(f"probe-{name.replace(':', '-')}.json")
    if path.is_dir():
        raise refuse("--out", str(path), "is a folder", "name a file")
    began = time.perf_counter()
    with progress_bar("probing", "blocks", "loading the model") as reporter:
        backbone, weights = _load(chosen, settings, place, precision, random_weights, eager, reporter.notice)
        own = backbone.spec.name
        used = resolve_flow("auto" if flow is None else flow, reporter.notice, backbone=own, device=place)
        found = build_flow(used, device=place, notice=reporter.notice, backbone=own)
        made = probe(backbone, found if eager else accelerate_flow(found), settings, reporter)
    gpu = torch.cuda.get_device_name(place) if place.startswith("cuda") else platform.machine()
    result: dict[str, Any] = {
        "backbone": name,
        "weights": weights,
        "flow": used,
        "device": gpu,
        "dtype": precision,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.perf_counter() - began, 1),
        **made,
    }
    write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
    typer.echo(_summary(result))
    typer.echo(path)


def _load(
    chosen: Choice[BackboneConfig],
    settings: ProbeSettings,
    device: str,
    dtype: str,
    random_weights: bool,
    eager: bool,
    notice: Notice,
) -> tuple[Backbone, str]:
    """Return the model, and whose weights it has."""
    public = isinstance(chosen.settings, WanConfig)
    if isinstance(chosen.settings, HeliosConfig):
        # Before its 14B weights are loaded.
        raise refuse_carried(chosen.name)
    if random_weights:
        if not public:
            limit = "random weights are for the public models of the Wan family"
            raise refuse("--random-weights", chosen.name, limit, "leave it out")
        speed = SpeedSettings(chosen.name, "sink", "tiny", device, dtype, blocks=2, eager=eager)
        return make_parts(speed).backbone, "random"
    prompts = (settings.before, settings.after)
    made = chosen.settings.build(device=device, dtype=DTYPES[dtype], prompts=prompts, notice=notice)
    return made if eager else accelerate(made), "published" if public else "the package's own"


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
    return "\n".join(lines)
