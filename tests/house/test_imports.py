"""Who may import whom (the table of the house), and that the core needs no extra."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "recap"

# Room -> what it may import of ours. A room may always import from itself.
# The last makes up for what older versions of Python and torch lack.
GROUND = {"types", "contracts", "errors", "io.older"}
CORE = GROUND | {"attention", "flow", "admission", "memory", "backbones", "plan", "rollout", "io"}
COMPOSED = CORE | {"run", "registry", "config", "fast", "__init__"}
MAY_IMPORT = {
    "types": {"io.older"},
    "errors": set(),
    "contracts": {"types", "errors", "io.older"},
    "io": GROUND,
    "attention": GROUND,
    "flow": GROUND | {"io"},
    "admission": GROUND | {"flow.warp", "attention.likeness"},
    # A memory may choose by rotated keys, as attention reads them, and by how alike keys are, over all heads.
    "memory": GROUND | {"attention.heads", "attention.rope", "attention.likeness", "io.cast"},
    "backbones": GROUND | {"attention", "io"},
    "plan": GROUND,
    "rollout": GROUND | {"attention.context", "backbones.noise", "plan"},
    "registry": CORE | {"eval.judges"},
    "config": CORE | {"registry"},
    "run": COMPOSED,
    "session": COMPOSED,
    # The fast twins of models, and `recap bench`, which times whole runs of them.
    "fast": COMPOSED | {"show.svg"},
    "__init__": COMPOSED | {"attach", "session", "show.result"},
    "attach": (COMPOSED - {"backbones", "__init__"}) | {"backbones.helios"},  # Helios has the same processors
    "eval": GROUND | {"io", "flow", "backbones.tiny"},  # judges of the embedded world know its words
    "show": COMPOSED,
    "studio": COMPOSED | {"session", "show", "eval"},
    "tables": COMPOSED | {"eval", "show"},
    "cli": COMPOSED | {"show", "eval", "tables", "studio"},
    "__main__": {"cli"},
}

EXTRAS = {
    "cv2",
    "torchvision",
    "diffusers",
    "transformers",
    "huggingface_hub",
    "ftfy",
    "sentencepiece",
    "google",
    "ray",
    "fastapi",
    "starlette",
    "uvicorn",
    "websockets",
    "pydantic",
    "aiohttp",
    "yarl",
    "fsspec",
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Our modules that a file imports, as dotted names below `recap`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name} imports relatively; write recap.… in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {n if is_module(n) else node.module for n in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    ours = {name for name in found if name == "recap" or name.startswith("recap.")}
    return {name.removeprefix("recap").lstrip(".") or "__init__" for name in ours}


def is_module(name: str) -> bool:
    place = SOURCE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_keep_to_the_table(path):
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is a new room: give it a row in the table"
    allowed = MAY_IMPORT[room] | {room}
    for name in imported(path):
        permitted = any(name == a or name.startswith(f"{a}.") for a in allowed)
        assert permitted, f"{room} may not import recap.{name}"


def test_nobody_imports_the_commands():
    for path in modules():
        if room_of(path) not in ("cli", "__main__"):
            assert not any(name.split(".")[0] == "cli" for name in imported(path)), path


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_optional_packages_are_imported_lazily(path):
    """Machines without the extras must be able to import every module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not any(n.split(".")[0] in EXTRAS for n in names)
