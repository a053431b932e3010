"""What a fresh clone gets: every needed package, the paper's flow, and no failure without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands in for python3: makes an environment in which pip installs nothing and `recap` does as it is told.
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p .venv/bin
    printf '#!/bin/sh\\nexit 0\\n' > .venv/bin/python
    printf '#!/bin/sh\\necho "$@" >> asked\\necho many; echo lines >&2\\n' > .venv/bin/recap
    echo "exit $WITHOUT_NETWORK" >> .venv/bin/recap
    chmod +x .venv/bin/python .venv/bin/recap
fi
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize("without_network", ["0", "1"])
def test_make_fetches_the_weights_and_goes_on_without_them(tmp_path, without_network):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        ["make", "PYTHON=./python3", ".venv/ready"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "WITHOUT_NETWORK": without_network},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv" / "ready").is_file()
    assert (tmp_path / "asked").read_text() == "weights raft-small\n"
    shown = [line for line in (done.stdout + done.stderr).splitlines() if "RAFT" in line or "lines" in line]
    assert len(shown) == int(without_network)
    assert all("flow is classical" in line and "recap weights raft-small" in line for line in shown)


def test_the_flow_without_weights_needs_no_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("opencv-python-headless") for name in project["dependencies"])
    extras = project["optional-dependencies"]
    assert "flow" not in extras and not any("flow" in name for names in extras.values() for name in names)
