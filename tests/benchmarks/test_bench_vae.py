from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from benchmarks.vae import SIZES, main


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    main(["--size", "small", *arguments])
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_every_decoder_computes_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    made = rows(capsys, "--blocks", "1", "--plain")
    assert [row["decoder"] for row in made] == ["vae plain", "vae fast", "tiny plain", "tiny fast"]
    for row in made:
        assert row["error_max"] < 1e-4 and row["ms"] > 0, row  # type: ignore[operator]


@pytest.mark.skipif(find_spec("triton") is not None, reason="would have the tiles compiled")
def test_what_fails_is_told_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles need Triton and a device, which tests do without."""
    monkeypatch.setitem(SIZES, "small", SIZES["small"]._replace(width=32))
    made = rows(capsys, "--layers")
    failed = [row for row in made if "failed" in row]
    assert failed and len(made) > len(failed)
    assert all((row["way"] == "conv3d") == ("ms" in row) for row in made)
    assert sum(str(row["way"]).endswith("(chosen)") for row in made) >= 4
