"""Rules of the house that a reader would otherwise have to hold in mind."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer

from recap.cli.main import app
from recap.flow import FLOWS
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "recap"
PYTHON = sorted([*SOURCE.rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])


def test_rooms_stay_few():
    # The marker of typed packages is no room.
    entries = [path.name for path in SOURCE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= 24, sorted(entries)


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes_of_models_stand_in_spec_tables_only(path):
    """1560 tokens, 4680 a block, 32760 a cache, 1536 and 8960 channels: another model must not be an edit."""
    if path.name != "spec.py":
        numbers = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not numbers & {1560, 4680, 32760, 1536, 8960}


def test_no_class_name_stands_twice():
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_every_name_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name in [*BACKBONES, *MEMORIES, *ADMISSIONS, *FLOWS]:
        assert f"`{name}`" in readme, name


def test_equations_of_the_paper_are_mapped():
    method = (ROOT / "docs" / "method.md").read_text()
    for file, name in re.findall(r"`(src/recap/[\w/]+\.py)`: `(\w+)`", method):
        text = (ROOT / file).read_text()
        assert re.search(rf"(def|class) {name}\b|\b{name}\b.*[:=]", text), f"{file} has no {name}"
    for equation in ("layout_base", "sink", "layout_bank", "novelty", "score"):
        assert f"eq. ({equation})" in method, equation


OPTIONS = {
    "generate": {
        "--seconds", "--script", "--backbone", "--memory", "--flow", "--seed", "--rows", "--set", "--device",
        "--out", "--from", "--resume", "--from-block", "--trust-code", "--help", "--continue", "--image",
        "--as-released", "--decoder", "--lora", "--prompt-embeds", "--dtype", "--eager", "--cast", "--devices",
        "--low-memory", "--precision",
    },
    "compare": {
        "--memories", "--seconds", "--script", "--backbone", "--flow", "--seed", "--set", "--device", "--out",
        "--continue", "--image", "--as-released", "--decoder", "--lora", "--prompt-embeds", "--dtype", "--eager",
        "--low-memory", "--rows", "--from", "--trust-code", "--help", "--cast", "--devices", "--precision",
    },
    "cast": {"--help"},
    "cast save": {"--name", "--at", "--box", "--pick", "--words", "--row", "--out", "--trust-code", "--help"},
    "cast show": {"--out", "--help"},
    "cast merge": {"--out", "--help"},
    "show": {"--open", "--trust-code", "--help"},
    "studio": {
        "--port", "--host", "--token", "--folder", "--backbone", "--batch", "--demo", "--open", "--no-open",
        "--precision", "--low-memory", "--lora", "--help",
    },
    "serve": {
        "--port", "--host", "--token", "--store", "--backbone", "--ray", "--replicas", "--most-replicas",
        "--sessions", "--batch", "--cpus", "--gpus", "--queue", "--patience", "--idle", "--memory-gb", "--help",
        "--precision", "--low-memory", "--lora",
    },
    "inspect": {"--out", "--flow", "--capacity-frames", "--size", "--set", "--device", "--help"},
    "list": {"--help"},
    "weights": {"--dry-run", "--help"},
    "bench": {
        "--backbone", "--memory", "--admission", "--decoder", "--blocks", "--compare", "--profile", "--plot",
        "--device", "--dtype", "--precision", "--eager", "--help",
    },
    "probe": {
        "--out", "--before", "--after", "--blocks", "--seed", "--random-weights", "--flow", "--device", "--dtype",
        "--eager", "--precision", "--low-memory", "--help",
    },
    "verify": {
        "--out", "--prompt", "--seconds", "--memories", "--seed", "--random-weights", "--decoder", "--lora", "--set",
        "--flow", "--device", "--dtype", "--eager", "--precision", "--low-memory", "--help",
    },
    "reproduce": {
        "--backbone", "--prompts", "--seeds", "--seconds", "--flow", "--judge-flow", "--embedder", "--detector",
        "--workers", "--rows", "--scorers", "--minutes", "--ray", "--commit", "--device", "--dtype", "--out",
        "--judge", "--schedules", "--prompt-file", "--suite", "--half", "--stored", "--help",
    },
    "report": {"--markdown", "--help"},
    "study": {"--help"},
    "study make": {
        "--pairs", "--questions", "--ours", "--repeats", "--identical", "--title", "--seed", "--out", "--key",
        "--help",
    },
    "study serve": {"--votes", "--port", "--host", "--token", "--open", "--no-open", "--help"},
    "study report": {"--key", "--out", "--help"},
    "convert": {"--lora", "--ema", "--no-ema", "--dtype", "--help"},
}  # fmt: skip


def all_commands(command, name=""):
    """Every command under its full name, those of groups included."""
    yield name, command
    for part, below in getattr(command, "commands", {}).items():
        yield from all_commands(below, f"{name} {part}".strip())


def test_commands_and_options_do_not_swell_by_accident():
    found = {
        name: {"--help", *(option for p in command.params for option in (*p.opts, *p.secondary_opts))}
        for name, command in all_commands(typer.main.get_command(app))
    }
    del found[""]
    assert {
        name: {option for option in options if option.startswith("--")} for name, options in found.items()
    } == OPTIONS


EXTRAS = {
    "cv2", "torchvision", "diffusers", "transformers", "huggingface_hub", "ftfy", "sentencepiece", "ray", "pytest",
    "hypothesis",
}  # fmt: skip


@pytest.mark.slow
def test_wheel_builds_and_imports_without_extras(tmp_path):
    """Everything in the wheel imports with nothing but the core dependencies."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True,
        capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = [n for n in archive.namelist() if n.endswith(".py") and "__main__" not in n]
        for name in (
            "page.html",
            "video.html",
            "look.css",
            "wall.js",
            "video.js",
            "study.html",
            "study.js",
            "votes.js",
            "study.css",
        ):
            assert f"recap/show/{name}" in archive.namelist()
        weights = sorted(SOURCE.rglob("*.safetensors"))
        assert {file.parent.parent.name for file in weights} == {"tiny", "flow"}
        for file in weights:
            assert str(file.relative_to(SOURCE.parent)) in archive.namelist()
    modules = [n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in names]
    program = f"""
import sys
class NoExtras:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ImportError(name + " is an extra")
sys.meta_path.insert(0, NoExtras())
sys.path.insert(0, {str(site)!r})
import importlib
for name in {modules!r}:
    importlib.import_module(name)
import recap
assert recap.__file__.startswith({str(site)!r}), recap.__file__
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_version_is_stated_once():
    import recap

    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{recap.__version__}"' in project
