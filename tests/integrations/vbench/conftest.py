"""The plug-in as pip leaves it, and VBench's environment: a real one, with the stand-in from a wheel on this disk."""

from __future__ import annotations

import sys

import pytest
from vbench_standin import REQUIREMENTS, write_wheel

from recap_vbench.environment import set_up


@pytest.fixture(scope="session", autouse=True)
def _installed(plug_in):
    """Every test here sees the plug-in."""


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
