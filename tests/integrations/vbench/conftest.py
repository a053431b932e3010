"""The plug-in as pip leaves it, and VBench's environment: a real one, with the stand-in from a wheel on this disk."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest
from vbench_standin import REQUIREMENTS, write_wheel

from recap_vbench.environment import set_up

PLUG_IN = Path(__file__).resolve().parents[3] / "integrations" / "vbench"


@pytest.fixture(scope="session", autouse=True)
def plug_in(tmp_path_factory):
    """Register the plug-in for this process and for those that it starts, whether or not it is installed here."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((PLUG_IN / "pyproject.toml").read_text())["project"]
    about = site / "recap_vbench-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = [f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in points.items())
             for group, points in project["entry-points"].items()]  # fmt: skip
    (about / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        paths = [str(site), str(PLUG_IN / "src"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder)
    return folder


@pytest.fixture(scope="session")
def environment(wheels, tmp_path_factory):
    """Make a finished environment and return its folder."""
    folder = tmp_path_factory.mktemp("vbench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        set_up(folder, lambda line: None, requirements=REQUIREMENTS, python=sys.executable)
    return folder
