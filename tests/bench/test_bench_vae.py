from __future__ import annotations

import json

import pytest

from recap.bench.vae import main


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    main(["--size", "small", *arguments])
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_every_variant_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["conv3d", "planar+graph", "folded+subpixel", "summed+kernels+tuned", "shifted+subpixel+graph"]
    made = rows(capsys, "--blocks", "1", "--variants", ",".join(names))
    assert [row["variant"] for row in made] == names
    for row in made:
        assert row["error_max"] < 1e-5 and row["ms"] > 0, row  # type: ignore[operator]


def test_what_fails_is_told_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The shifted products need Triton and a device, which tests do without."""
    made = rows(capsys, "--layers")
    failed = [row for row in made if "failed" in row]
    assert failed and len(made) > len(failed)
    assert all(str(row["way"]).startswith("shifted") for row in failed)


def test_misspelt_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'folded'"):
        main(["--variants", "foldet+graph"])
