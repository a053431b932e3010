"""Openings by kind, and who is hidden."""

from __future__ import annotations

from collections import Counter

import torch

from recap.backbones.tiny.vocabulary import ACTORS
from training.openings import (
    EACH,
    MIDDLE_SIZE,
    Looked,
    _by_kind,
    _check,
    _script,
    kind_prompts,
    not_hidden,
    usual_cells,
)


def test_every_kind_is_asked_for_as_often_in_all_settings():
    prompts = kind_prompts(EACH * len(ACTORS), 3)
    assert set(Counter(prompt.actors for prompt in prompts).values()) == {EACH}
    # There are 24 settings, so each kind meets all of them before one comes again.
    for kind in ("fox", "ghost"):
        own = [(prompt.scene, prompt.time) for prompt in prompts if prompt.actors == (kind,)]
        assert len(set(own[:24])) == 24 and own[24:] == own[:6]
    assert len({(prompt.scene, prompt.time) for prompt in prompts[:24]}) == 24


def test_usual_is_the_median_of_the_rendered_ones_of_a_kind():
    prompts = kind_prompts(4 * len(ACTORS), 3)
    cells = torch.cat((torch.full((24,), 10.0), torch.full((24,), 12.0), torch.full((24,), 40.0)))
    cells[[0, 24, 48]] = 6.0
    usual = usual_cells(prompts, cells)
    assert len(usual) == 96 and usual[0] == usual[72] == 6 and set(usual[1:24].tolist()) == {12}
    assert not_hidden(torch.tensor([2.9, 6.0]), usual).tolist() == [0, 1]


def looked(cells: list[float], visible: list[float]) -> Looked:
    num = len(cells)
    return Looked(torch.ones(num, 1), torch.tensor(cells)[:, None], torch.ones(num), torch.tensor(visible))


def test_the_check_compares_with_what_is_truly_visible():
    found, table = _check(looked([2, 9, 8, 12], [0.2, 0.3, 0.5, 0.9]), torch.full((4,), 12.0))
    assert [each["not_hidden"] for each in found.values()] == [0.5, 1, 1]
    assert [each["n"] for each in found.values()] == [2, 1, 1] and len(table) == 4


def test_kinds_are_listed_from_the_worst():
    prompts = kind_prompts(2 * len(ACTORS), 3)
    seen = looked([12.0] * 48, [1.0] * 48)
    seen.found[ACTORS.index("bus")] = 0.4
    kinds, table = _by_kind(prompts, seen, torch.full((48,), 12.0))
    assert kinds["bus"] == {"shown": 0.5, "not_hidden": 1, "n": 2} and table[1][0] == "bus"
    assert kinds["fox"]["shown"] == 1 and len(table) == 25


def test_who_stands_behind_something_is_seen_less(world):
    prompts = kind_prompts(len(ACTORS), 5)
    shares = []
    for front in (False, True):
        scripts = [_script(prompt, front=front) for prompt in prompts]
        assert scripts[0].actors[0].size == MIDDLE_SIZE
        shares.append(world.film(scripts, 5, 1).visibility[:, 0, 0])
    clear, behind = shares
    assert (clear > 0.7).all() and (behind < 0.7).sum() > 6 and (behind <= clear + 1e-6).all()
