"""The small vocabulary: what it says it reads back, and what it does not know it says clearly."""

from __future__ import annotations

import itertools

import pytest

from recap.backbones.tiny.vocabulary import (
    ACTORS,
    EMPTY,
    PAD,
    SCENES,
    TEXT_LENGTH,
    TIMES,
    WORDS,
    Prompt,
    null_token_ids,
    parse_prompt,
    prompt_from_ids,
    prompt_text,
    token_ids,
)


def test_every_prompt_reads_back():
    casts = [(), *((actor,) for actor in ACTORS), ("owl", "fox"), ("ghost", "elephant", "cat")]
    for actors, scene, time in itertools.product(casts, SCENES, TIMES):
        prompt = Prompt(actors, scene, time)
        assert parse_prompt(prompt_text(prompt)) == prompt
        assert sorted(prompt_from_ids(token_ids(prompt)).actors) == sorted(actors)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("a fox and a bus on a beach at night", Prompt(("fox", "bus"), "beach", "night")),
        ("An empty beach, at night.", Prompt((), "beach", "night")),
        ("Foxes and buses in the woods", Prompt(("fox", "bus"), "forest", "day")),
        ("the sheep under the sea at dusk", Prompt(("sheep",), "sea", "evening")),
        ("a bunny walking in the mountains", Prompt(("rabbit",), "mountains", "day")),
    ],
)
def test_ways_of_saying_it(text, prompt):
    assert parse_prompt(text) == prompt


def test_a_sentence_is_one_sentence():
    assert prompt_text(Prompt(("fox", "owl", "bus"), "sea")) == "a fox, an owl and a bus under the sea by day"
    assert prompt_text(Prompt((), "snow", "night")) == "empty snow at night"


def test_ids_have_one_length_and_one_order():
    ids = token_ids("a bus and a fox on a beach at night")
    assert ids == token_ids(Prompt(("fox", "bus"), "beach", "night"))
    assert len(ids) == TEXT_LENGTH and [WORDS[i] for i in ids] == ["beach", "night", "fox", "bus", "<pad>"]
    assert token_ids("an empty beach")[2:] == [EMPTY, PAD, PAD]
    named = token_ids("a bus and a fox on a beach at night", as_named=True)
    assert [WORDS[i] for i in named] == ["beach", "night", "bus", "fox", "<pad>"]
    assert prompt_from_ids(named).actors == ("bus", "fox")
    assert len(null_token_ids()) == TEXT_LENGTH
    assert len(WORDS) == len(set(WORDS)) and WORDS[PAD] == "<pad>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a penguine on a beach", "'penguine'.*did you mean 'penguin'"),
        ("a fox on a beech", "'beech'.*did you mean 'beach'"),
        ("a xylophone in a city", "'xylophone'.*actors: fox, cat"),
        ("a fox", "names no scene.*on a beach"),
        ("a fox in a city in the snow", "more than one scene"),
        ("a fox in a city by day at night", "more than one time"),
        ("an empty city with a fox", "empty"),
        ("a fox and a fox in a city", "two of a kind"),
        ("a fox, a cat, a dog and a duck in a city", "at most 3"),
    ],
)
def test_refusals_say_what_to_do(text, message):
    with pytest.raises(ValueError, match=message):
        parse_prompt(text)
