"""What the README shows is run here as printed."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

import recap

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_six_lines_draw_a_video(capsys):
    lines = (
        SNIPPETS[0]
        .replace('"seconds": 10', '"seconds": 2, "cut": False')
        .replace('"memory": "recap"', '"memory": "recap", "flow": "classical"')
    )
    exec(compile(lines, "README", "exec"), {})
    said = capsys.readouterr().out
    assert "torch.Size([1, 9, 3, 128, 208])" in said and "bank" in said


@pytest.fixture
def _example(monkeypatch, tmp_path):
    """The memory of the README as a file of the current folder."""
    (tmp_path / "my_memory.py").write_text(SNIPPETS[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("my_memory", None)


@pytest.mark.usefixtures("_example")
def test_the_memory_of_the_readme_is_the_plain_window(backbone):
    """With a window of two blocks, the last block is all that `none` remembers too; of a wider one it drops more."""
    assert len(SNIPPETS[1].splitlines()) < 20
    shots = [{"prompt": "a red boat", "seconds": 3}, {"prompt": "a house", "seconds": 2}]
    drawn = {}
    for name in ("none", "my_memory:LastBlockConfig"):
        config = recap.RunConfig.from_dict({"shots": shots, "memory": name})
        memory = recap.build_memory(config, backbone.spec)
        plan = recap.make_plan([config.shots], backbone.spec)
        drawn[name] = torch.cat([b.latents for b in recap.rollout(backbone, memory, plan, seeds=[0])])
    assert torch.equal(*drawn.values())
    wide = dataclasses.replace(backbone.spec, window_frames=21)
    for block in recap.rollout(backbone, recap.build_memory(config, wide), plan, seeds=[0]):
        last = block.memory.tokens
    assert last == {"prior": wide.block_tokens, "current": wide.block_tokens}
