"""This module writes run.json, which lists what a run depends on, and compares it with what a resumed run has."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from recap.errors import refuse
from recap.io.files import write_whole
from recap.io.run_folder import digest_file
from recap.types import BackboneSpec

VERSION = "0.1.0"


def write_record(
    folder: Path, config: Mapping[str, Any], versions: Mapping[str, Any], spec: BackboneSpec, settings: object
) -> None:
    """Write run.json: the config, what else the bits depend on, the backbone's spec and digests of added files."""
    about = {"config": config, "versions": versions, "spec": asdict(spec), "added": _digest_added(settings)}
    write_whole(folder / "run.json", json.dumps(about, indent=2).encode())


def check_record(about: Mapping[str, Any], spec: BackboneSpec, settings: object) -> None:
    """Refuse to continue a run with another backbone, or other added files, than those it recorded."""
    own, recorded = json.loads(json.dumps(asdict(spec))), about.get("spec")
    # An older version recorded no number of steps.
    if not isinstance(recorded, Mapping) or {"num_steps": own["num_steps"], **recorded} != own:
        raise refuse("spec", about.get("spec"), "is not that of the run's backbone", "put run.json back")
    added = about.get("added", {})
    for file, digest in _digest_added(settings).items():
        if not isinstance(added, Mapping) or added.get(file) != digest:
            limit = "it is not the file that the run began with"
            raise refuse("file", file, limit, "put that one back, or start another run")


def versions() -> dict[str, Any]:
    """List what the bits of a run depend on besides its config."""
    packages = ("torch", "numpy", "safetensors", "av", "opencv-python-headless")
    installed = {d.name: d.version for d in metadata.distributions() if d.name in packages}
    return {
        "recap": VERSION,
        **{name: installed.get(name, "none") for name in packages},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _digest_added(settings: object) -> dict[str, str]:
    """Return the digests of the files that a backbone's settings put on top of its own weights, such as LoRAs."""
    # Only the backbones that take such files have the method.
    return {str(file): digest_file(file) for file in getattr(settings, "added_files", list)()}
