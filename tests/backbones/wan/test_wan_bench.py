from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.wan import WanSettings, measure
from recap.backbones.wan.family import WanConfig
from recap.backbones.wan.spec import UNTRAINED


@dataclass(frozen=True, slots=True)
class SmallConfig(WanConfig):
    """A small version of a public backbone."""

    row = replace(UNTRAINED, name="self-forcing", layers=2)


def test_weights_are_written_and_loaded_and_a_video_generated(tmp_path: Path) -> None:
    result = measure(SmallConfig, WanSettings(blocks=6), tmp_path)
    assert result["pictures"] == 9 + 5 * 12 and result["row"] == "self-forcing"
    assert result["block_s_median"] > 0 and result["peak_gb"] is None
