"""The layout of a study: balanced for every rater and over all of them, and a key that cannot be changed unseen."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from recap.eval.study.design import IDENTICAL, PAIR, Key, Study, canonical_json, choose_pairs
from tests.study.conftest import paper_key


@settings(max_examples=40, deadline=None)
@given(
    rivals=some.integers(1, 5),
    per_rival=some.integers(1, 9),
    identical=some.integers(0, 3),
    repeats=some.integers(0, 3),
    seed=some.integers(0, 9),
)
def test_every_sheet_is_balanced_and_has_its_checks(rivals, per_rival, identical, repeats, seed):
    total = rivals * per_rival
    repeats, identical = min(repeats, total // 2), min(identical, total)
    key = paper_key([f"rival{n}" for n in range(rivals)], per_rival, identical, repeats, seed=seed)
    for sheet in key.study.sheets:
        shown = Counter(pair for pair, _ in sheet)
        assert len(sheet) == total + identical + repeats and set(shown) == set(key.study.pairs)
        assert sum(count == 2 for count in shown.values()) == repeats and max(shown.values()) <= 2
        sides: dict[str, list[bool]] = {}
        seen: dict[str, bool] = {}
        for pair, swapped in sheet:
            if pair in seen:
                assert swapped != seen[pair], "a repeated pair changes its sides"
            elif key.pairs[pair].kind == PAIR:
                sides.setdefault(key.rival_of(pair), []).append(key.ours_on_a((pair, swapped)))
            seen.setdefault(pair, swapped)
        assert all(abs(2 * sum(own) - len(own)) <= 1 for own in sides.values())
        everything = [side for own in sides.values() for side in own]
        assert abs(2 * sum(everything) - len(everything)) <= 1


def test_over_all_sheets_every_pair_comes_at_every_place_and_on_both_sides(key):
    pairs = [name for name, facts in key.pairs.items() if facts.kind == PAIR]
    places = {pair: Counter() for pair in pairs}
    left = Counter()
    for sheet in key.study.sheets:
        first: dict[str, tuple[str, bool]] = {}
        for trial in sheet:
            if key.pairs[trial[0]].kind == PAIR:
                first.setdefault(trial[0], trial)
        for place, trial in enumerate(first.values()):
            places[trial[0]][place] += 1
            left[trial[0]] += key.ours_on_a(trial)
    assert len(key.study.sheets) == 2 * len(pairs)
    assert all(set(found.values()) == {2} and len(found) == len(pairs) for found in places.values())
    assert set(left.values()) == {len(pairs)}


def test_somebody_who_stops_early_has_met_a_check(key):
    for sheet in key.study.sheets:
        met = [place for place, (pair, _) in enumerate(sheet) if key.pairs[pair].kind == IDENTICAL]
        assert met[0] < len(sheet) / 2 and met[0] > 0


def test_pairs_are_spread_over_rivals_and_prompts():
    at = [(f"prompt {n}", f"match {n} {seed}") for n in range(12) for seed in range(3)]
    chosen = choose_pairs({"a": at, "b": at, "c": at, "d": at}, 24, random.Random(1))
    assert {rival: len(own) for rival, own in chosen.items()} == dict.fromkeys("abcd", 6)
    assert all(len({prompt for prompt, _ in own}) == 6 for own in chosen.values())
    used = Counter(prompt for own in chosen.values() for prompt, _ in own)
    assert set(used.values()) == {2}, "24 pairs of 12 prompts: every one twice"
    with pytest.raises(ValueError, match=r"--pairs is 200: .* a, and 36 of"):
        choose_pairs({"a": at, "b": at, "c": at, "d": at}, 200, random.Random(1))


def test_a_key_comes_back_as_it_was_and_a_changed_one_is_refused(key):
    written = json.loads(json.dumps(key.as_dict()))
    again = Key.from_dict(written, "key")
    assert again.study.digest == key.study.digest and again.rivals == key.rivals == ["none", "memrope"]
    assert again.as_dict() == key.as_dict()
    pair = next(iter(written["pairs"]))
    written["pairs"][pair]["methods"].reverse()
    with pytest.raises(ValueError, match="was changed"):
        Key.from_dict(written, "key")


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"questions": {}},
        {"sheets": []},
        {"sheets": [[["x", 0]]]},
        {"pairs": {"a": ["../../x.mp4", "b"]}},
    ],
)
def test_a_study_that_no_command_wrote_is_refused(key, change):
    good = json.loads(json.dumps(key.study.as_dict()))
    assert Study.from_dict(good, "study.json").digest == key.study.digest
    for wrong in ({**good, **change}, None, [], "x"):
        with pytest.raises(ValueError, match="study"):
            Study.from_dict(wrong, "study.json")
    for wrong in (None, {}, {"study": good, "digest": "x"}):
        with pytest.raises(ValueError, match="--key"):
            Key.from_dict(wrong, "key")


@pytest.mark.parametrize(
    "change",
    [{"ours": None}, {"ours": "sink"}, {"made": {"methods": 5}}, {"made": {"methods": [[]]}}, {"made": []}],
)
def test_a_key_that_says_the_impossible_is_refused_though_its_digest_is_right(key, change):
    own = {name: value for name, value in key.as_dict().items() if name != "digest"} | change
    own["digest"] = hashlib.sha256(canonical_json(own).encode()).hexdigest()
    with pytest.raises(ValueError, match="is not the key of a study"):
        Key.from_dict(own, "key")
