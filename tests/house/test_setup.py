"""What a fresh clone gets: every needed package and no other, the paper's flow, and no failure without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tomllib

from tests.conftest import SLOW

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Stands in for python3: makes an environment in which pip and `recap` only write down how they were called.
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "$@" >> installed\\n' > .venv/bin/python
    printf '#!/bin/sh\\necho "$@" >> asked\\necho many; echo lines >&2\\n' > .venv/bin/recap
    echo "exit $WITHOUT_NETWORK" >> .venv/bin/recap
    chmod +x .venv/bin/python .venv/bin/recap
fi
"""


@pytest.fixture
def make(tmp_path):
    """Runs make in a copy of what it needs."""
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)

    def run(target, without_network="0"):
        done = subprocess.run(
            ["make", "PYTHON=./python3", target], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "WITHOUT_NETWORK": without_network},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("without_network", ["0", "1"])
def test_make_fetches_the_weights_and_continues_without_them(tmp_path, make, without_network):
    output = make(".venv/ready", without_network)
    assert (tmp_path / ".venv" / "ready").is_file()
    assert (tmp_path / "asked").read_text() == "weights raft-small\n"
    shown = [line for line in output.splitlines() if "RAFT" in line or "lines" in line]
    assert len(shown) == int(without_network)
    assert all("flow is classical" in line and "recap weights raft-small" in line for line in shown)


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", [["."]]),
        (".venv/ready-dev", [["."], [".[dev]", "integrations/vbench"]]),
        ("docs", [["."], [".[docs]"]]),
    ],
)
def test_a_target_installs_what_it_needs_and_no_more(tmp_path, make, target, extras):
    make(target)
    calls = (tmp_path / "installed").read_text().splitlines()
    pip = [call for call in calls if call.startswith("-m pip install")]
    assert [call.split(" -e ")[1:] for call in pip] == extras
    assert all("-c constraints.txt" in call for call in pip)


def test_every_lower_limit_is_the_version_that_is_tested():
    """`make test-oldest` installs exactly what pyproject.toml says is enough."""
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    limits = {line.split(">=")[0]: line.split(">=")[1].partition(";")[0] for line in PROJECT["dependencies"]}
    assert oldest.keys() == limits.keys()
    for name, limit in limits.items():
        version = [int(part) for part in oldest[name].split(".")]
        wanted = [int(part) for part in limit.split(".")]
        assert version[: len(wanted)] == wanted, name
    assert PROJECT["requires-python"] == ">=3.10"


def test_every_lower_limit_that_users_install_has_a_reason():
    """A comment right above the requirement, or above the extra if that is one line."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *(line for name in ("wan", "studio", "ray", "helios") for line in extras[name]),
    ]
    for requirement in wanted:
        if requirement.startswith(("recap-forcing", "tomli", "typing-extensions")):
            continue
        (at,) = [i for i, line in enumerate(lines) if f'"{requirement}"' in line and not line.startswith("#")]
        above = lines[at - 1].strip()
        assert above.startswith("# ") and len(above) > 20, requirement


def test_the_demo_needs_no_tools_and_no_large_packages():
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert not names & {
        "ray",
        "mypy",
        "ruff",
        "pytest",
        "hypothesis",
        "diffusers",
        "transformers",
        "mkdocs-material",
    }
    assert not any("docs" in line or "mkdocs" in line for line in PROJECT["optional-dependencies"]["dev"])


def test_the_flow_without_weights_needs_no_extra():
    assert any(name.startswith("opencv-python-headless") for name in PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert "flow" not in extras and not any("flow" in name for names in extras.values() for name in names)


def test_every_required_package_is_pinned():
    """An unpinned torch would bring gigabytes of CUDA into every clone."""
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    # That environment has a newer Python than those that need the rest.
    lines = [line for line in lines if "python_version <" not in line]
    asked = {re.match(r"[\w-]+", line)[0] for line in lines} - {"recap-forcing"}
    assert asked <= pinned


def test_continuous_integration_runs_every_test():
    """`make test` leaves out what is marked slow; the script runs that, too, looks at style and builds the site."""
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (\S+)", script, flags=re.MULTILINE) == ["lint", "test", "test-slow", "docs"]
    makefile = (ROOT / "Makefile").read_text()
    assert "-m 'not slow'" in makefile and "-m slow" in makefile
    # The oldest versions too, or it says that it could not.
    assert "make test-oldest" in script and "NOT TESTED" in script


def test_every_slow_test_is_one():
    """A test that was renamed or removed would otherwise stay on the list, or come back into `make test`."""
    for name in SLOW:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        assert f"def {function.partition('[')[0]}(" in text, name
