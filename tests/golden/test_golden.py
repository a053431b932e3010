"""A seed keeps generating the same video: rounded figures and admissions of short rollouts, against stored ones."""

from __future__ import annotations

import json

import pytest

from tests.golden.rollouts import CASES, GOLDEN, generate


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("untrained")])
def test_a_seed_generates_what_it_did(name):
    golden, now = json.loads(GOLDEN.read_text())[name], generate(CASES[name])
    for block, (before, after) in enumerate(zip(golden["figures"], now["figures"], strict=True)):
        assert after == pytest.approx(before, abs=2e-3), f"block {block} of {name}"
    assert now["admitted"] == golden["admitted"]
