"""This script runs in VBench's own environment: `python inside.py JOB RESULT`. It imports only VBench.

A job is {"do": "check", "dimensions"} or {"do": "score", "dimension", "info", "device", "firsts", "at_most",
"weights"}; `info` is a file in the format that VBench's functions read, `at_most` the number of still clips that are
scored per prompt, 0 without the static filter. The result has the value of each clip, or {"error"}. The script calls
VBench's functions and not its commands, which need files that its wheel lacks and restrict file names.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PACKAGES = ("vbench", "torch", "torchvision", "numpy", "transformers", "timm", "pyiqa", "decord", "dreamsim")


def versions() -> dict[str, str]:
    """Return the versions of what a score depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check(dimensions: list[str]) -> dict[str, Any]:
    """Check that VBench can be imported; report where its prompts are and which dimensions lack a package."""
    vbench = importlib.import_module("vbench.utils")
    unusable = {}
    long = ("subject_consistency", "background_consistency", "static_filter")
    modules = {name: f"vbench.{name}" for name in dimensions}
    modules.update({f"{name} (long)": f"vbench2_beta_long.{name}" for name in long})
    for name, module in modules.items():
        try:
            importlib.import_module(module)
        except Exception as error:
            unusable[name] = f"{type(error).__name__}: {error}"
    info = Path(str(vbench.__file__)).parent / "VBench_full_info.json"
    return {"versions": versions(), "info": str(info), "unusable": unusable}


def score(job: dict[str, Any]) -> dict[str, Any]:
    """Return the value of each clip, and the fast value of each video that has a clip of first pictures."""
    dimension, info = job["dimension"], job["info"]
    torch = importlib.import_module("torch")
    name = job["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    started = time.monotonic()
    overall, clips = None, []
    if not job["at_most"] or keep_static(info, job["at_most"], device):
        compute = getattr(importlib.import_module(f"vbench.{dimension}"), f"compute_{dimension}")
        overall, clips = compute(info, device, parts_of(dimension))
    fast = fast_values(dimension, job["firsts"], device, job["weights"]) if job["firsts"] else []
    return {
        "versions": versions(),
        "device": name,
        "seconds": time.monotonic() - started,
        "overall": None if overall is None else float(overall),
        "clips": [[clip["video_path"], float(clip["video_results"])] for clip in clips],
        "fast": [[clip["video_path"], float(clip["video_results"])] for clip in fast],
    }


def parts_of(dimension: str) -> Any:
    """Return the paths of the weights that VBench's functions of a dimension load, fetched if need be."""
    utils = importlib.import_module("vbench.utils")
    return utils.init_submodules([dimension], local=False, read_frame=False)[dimension]


def fast_values(dimension: str, firsts: list[str], device: Any, weights: str) -> list[dict[str, Any]]:
    """Run the long package's functions on clips of first pictures: DINOv2 for subjects, DreamSim for backgrounds."""
    module = importlib.import_module(f"vbench2_beta_long.{dimension}")
    if dimension == "subject_consistency":
        torch = importlib.import_module("torch")
        model = torch.hub.load("facebookresearch/dinov2", "dinov2_vitb14").to(device)
        _, values = module.subject_consistency_dinov2(model, firsts, device, False)
    else:
        load = importlib.import_module("dreamsim").dreamsim
        cache = Path(weights) / "dreamsim"
        cache.mkdir(parents=True, exist_ok=True)
        model, prepare = load(pretrained=True, device=str(device), cache_dir=str(cache))
        _, values = module.background_consistency_dreamsim(model, prepare, firsts, device, False)
    result: list[dict[str, Any]] = values
    return result


def keep_static(info: str, at_most: int, device: Any) -> bool:
    """Leave only the clips in `info` that VBench's filter considers still, at most so many per prompt."""
    filters: Any = importlib.import_module("vbench2_beta_long.static_filter")
    # The module hard-codes "cuda" there.
    filters.DEVICE = device
    options = argparse.Namespace(
        model=parts_of("dynamic_degree")["model"], small=False, mixed_precision=False, alternate_corr=False
    )
    static_filter = filters.StaticFilter(options, device)
    entries = json.loads(Path(info).read_text(encoding="utf-8"))
    for entry in entries:
        still = (clip for clip in entry["video_list"] if static_filter.infer(clip))
        entry["video_list"] = list(itertools.islice(still, at_most))
    entries = [entry for entry in entries if entry["video_list"]]
    Path(info).write_text(json.dumps(entries), encoding="utf-8")
    return bool(entries)


def main(job_file: str, result_file: str) -> int:
    """Do a job; its result, or its error, is in the file for results before the process ends."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        result = check(job["dimensions"]) if job["do"] == "check" else score(job)
    except Exception as error:
        # Any failure must reach the calling process as a result.
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}", "module": getattr(error, "name", None)}
    written = Path(f"{result_file}.part")
    written.write_text(json.dumps(result), encoding="utf-8")
    os.replace(written, result_file)  # noqa: PTH105
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
