from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from benchmarks.vae import SIZES, main


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    main(["--size", "small", *arguments])
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    return found


@pytest.mark.slow
def test_every_decoder_computes_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(capsys, "--blocks", "1", "--plain")
    assert [found["decoder"] for found in results] == ["vae plain", "vae fast", "tiny plain", "tiny fast"]
    for found in results:
        assert found["error_max"] < 1e-4 and found["ms"] > 0, found  # type: ignore[operator]


@pytest.mark.skipif(find_spec("triton") is not None, reason="the tiles would be compiled")
def test_a_failure_is_reported_and_the_rest_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles need Triton and a device, which tests do not have."""
    monkeypatch.setitem(SIZES, "small", SIZES["small"]._replace(width=32))
    results = measured(capsys, "--layers")
    failed = [found for found in results if "failed" in found]
    assert failed and len(results) > len(failed)
    assert all((found["way"] == "conv3d") == ("ms" in found) for found in results)
    assert sum(str(found["way"]).endswith("(chosen)") for found in results) >= 4
