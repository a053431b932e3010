"""Prompts as people write them: what is shown, what is left out with a notice, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recap.backbones.tiny.backbone import EmbeddedConfig
from recap.backbones.tiny.reading import LONGEST, PromptReader, read_prompt
from recap.backbones.tiny.sentence import NEAR, Kind
from recap.backbones.tiny.vocabulary import (
    ACTORS,
    ALIASES,
    FILLERS,
    NAMED,
    SCENES,
    TABLES,
    TIMES,
    Prompt,
    parse_prompt,
    prompt_text,
    token_ids,
)

OTHER_NOUNS = [word for table in NEAR.values() for word in table]


def valid_prompts():
    """Every cast of up to two in every scene and time, every cast of three in one; in the order named."""
    for size in range(3):
        casts = itertools.permutations(ACTORS, size)
        yield from itertools.starmap(Prompt, itertools.product(casts, SCENES, TIMES))
    yield from (Prompt(cast, "sea", "night") for cast in itertools.permutations(ACTORS, 3))


def test_ids_of_valid_prompts_are_what_they_always_were():
    """The digest is of the first edition: weights were trained on these ids."""
    digest = hashlib.sha256()
    for prompt in valid_prompts():
        text = prompt_text(prompt)
        digest.update(f"{text}{token_ids(text)}{token_ids(text, as_named=True)}".encode())
    assert digest.hexdigest() == "a1f11b38e88f46d9cbd422eac8cabe0a494a4dba53e09d364541d7db08dc9ad7"


def test_a_valid_prompt_is_read_as_it_is_and_without_a_word():
    for prompt in itertools.islice(valid_prompts(), 0, None, 17):
        reading = read_prompt(prompt_text(prompt))
        assert reading.prompt == prompt and reading.notices == ()
    for alias, meant in ALIASES.items():
        text = f"the {alias} in a forest" if meant in ACTORS else f"a fox, {alias}"
        if meant not in TIMES:
            assert read_prompt(text).prompt == parse_prompt(text) and not read_prompt(text).notices


@pytest.mark.parametrize(
    ("text", "prompt", "notices"),
    [
        (
            "a cute fox runs happily on a sunny beach",
            Prompt(("fox",), "beach"),
            ["prompt: 'cute', 'runs', 'happily', 'sunny': left out"],
        ),
        ("a fluffy fox sniffs on a beach", Prompt(("fox",), "beach"), ["'fluffy', 'sniffs': left out"]),
        ("a bus parked on a beach", Prompt(("bus",), "beach"), ["'parked': left out"]),
        ("a bizarre vintage bus in a city", Prompt(("bus",), "city"), ["'bizarre', 'vintage': left out"]),
        ("a fox", Prompt(("fox",), "beach"), ["no scene is named: the video is set on a beach"]),
        ("a whale at night", Prompt(("whale",), "sea", "night"), ["no scene.*set under the sea"]),
        ("a red fox on a beach", Prompt(("fox",), "beach"), ["'red': left out, as colours cannot be asked"]),
        ("two foxes on a beach", Prompt(("fox",), "beach"), ["'two': numbers.*one of each kind is shown"]),
        ("a flock of 3 birds in a city", Prompt(("bird",), "city"), ["'flock', '3': numbers"]),
        ("a lion on a beach", Prompt(("cat",), "beach"), ["'lion' is not in the vocab.*: a cat is shown"]),
        ("wolves in the snow", Prompt(("fox",), "snow"), ["'wolves'.*a fox is shown instead"]),
        ("a truck and a bus in a city", Prompt(("car", "bus"), "city"), ["'truck'.*a car is shown instead"]),
        ("a fox in a jungle", Prompt(("fox",), "forest"), ["'jungle'.*set in a forest"]),
        ("a fox on a beach at dawn", Prompt(("fox",), "beach", "evening"), ["'dawn'.*set in the evening"]),
        ("a fox in a village in the snow", Prompt(("fox",), "snow"), ["'village': left out"]),
        ("a fox on the sand of a beach", Prompt(("fox",), "beach"), []),
        ("a sea lion on a beach", Prompt(("whale",), "beach"), ["'sea lion'.*a whale is shown"]),
        ("a tiger shark under the sea", Prompt(("fish",), "sea"), ["'tiger': left out", "'shark'.*a fish"]),
        ("a teddy bear in a city", Prompt(("bear",), "city"), []),
        ("a fox’s beach", Prompt(("fox",), "beach"), []),
    ],
)
def test_what_is_meant_is_generated_and_what_is_changed_is_reported(text, prompt, notices):
    reading = read_prompt(text)
    assert reading.prompt == prompt
    assert len(reading.notices) == len(notices)
    for line, wanted in zip(reading.notices, notices, strict=True):
        assert re.search(wanted, line), line


def test_nouns_become_what_is_alike():
    likely = {
        "lion": {"cat"}, "wolf": {"fox", "dog"}, "truck": {"bus", "car", "tractor"}, "dolphin": {"whale"},
        "shark": {"fish"}, "horse": {"sheep", "dog"}, "eagle": {"bird", "owl"}, "yacht": {"boat"}, "taxi": {"car"},
        "crocodile": {"dinosaur", "turtle"}, "panda": {"bear"}, "goose": {"duck"}, "mouse": {"rabbit"},
        "helicopter": {"bird", "balloon"}, "toad": {"frog"}, "rhino": {"elephant"}, "ship": {"boat"},
    }  # fmt: skip
    for word, shown in likely.items():
        (actor,) = read_prompt(f"a {word} on a beach").prompt.actors
        assert actor in shown, word
    assert read_prompt("a boat on the ocean").prompt.scene == "sea"


def test_the_table_of_nouns_is_sound():
    assert len(OTHER_NOUNS) >= 150
    assert len(OTHER_NOUNS) == len(set(OTHER_NOUNS)), "a noun is an actor, a scene or a time"
    harmless, colours = (TABLES["form"][name].split() for name in ("harmless", "colour"))
    assert not {*OTHER_NOUNS} & {*NAMED, *ALIASES, *FILLERS, *harmless, *colours}
    for kind, known in ((Kind.NEAR_ACTOR, ACTORS), (Kind.NEAR_SCENE, SCENES), (Kind.NEAR_TIME, TIMES)):
        for word, options in NEAR[kind].items():
            assert set(options) <= set(known)
            place = "" if known is SCENES else "in a city"
            prompt = read_prompt(
                f"a fish, the {word} {place}" if known is not ACTORS else f"a {word} {place}"
            )
            assert options[0] in (*prompt.prompt.actors, prompt.prompt.scene, prompt.prompt.time), word
            assert any(f"'{word}' is not in the vocabulary" in line for line in prompt.notices), word


@pytest.mark.parametrize(
    ("text", "actors"),
    [
        ("a beach with no fox", ()),
        ("a beach without a bus at night", ()),
        ("a beach without any big red bus", ()),
        ("a fox without a bus in the snow", ("fox",)),
        ("a fox, not a bus, on a beach", ("fox",)),
        ("neither a fox nor a bus on a beach", ()),
        ("a beach without foxes or buses", ()),
        ("no lion on a beach", ()),
        ("0 foxes on a beach", ()),
        ("an empty city with no people", ()),
        ("a city without trees", ()),
        ("no one on a beach", ()),
        ("a beach with no fox but a bus", ("bus",)),
        ("No fox. A bus on a beach.", ("bus",)),
    ],
)
def test_what_is_not_wanted_is_not_generated(text, actors):
    assert read_prompt(text).prompt.actors == actors


@pytest.mark.parametrize(
    "text",
    [
        "a beach without a fox and a bus",
        "a beach without a fox, a bus",
        "a fox isn’t on a beach",
        "a fox isn't a bus or is on a beach",
        "a fox not on a beach",
        "a fox and no beach",
        "not only a fox but also a bus on a beach",
        "no more than two foxes on a beach",
        "a fox-free beach",
        "all but a fox on a beach",
        "a beach instead of a fox",
        "a non-fox on a beach",
        "leave the fox out, on a beach",
        "a fox on a beach and no fox",
        "a fox or a bus on a beach",
    ],
)
def test_what_may_not_be_wanted_is_refused(text):
    with pytest.raises(ValueError, match=r"not clear|asks for 'fox' and for none|leaves open"):
        read_prompt(text)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        ["no", "without", "without a", "not a", "no big", "never a", "neither a", "zero", "except a"]
    ),
    st.sampled_from([*ACTORS, *NEAR[Kind.NEAR_ACTOR]]),
    st.sampled_from(
        ["{} on a beach", "a beach {}", "a robot, {}, in a city", "a snowy beach with {} at night"]
    ),
)
def test_no_negated_actor_is_ever_generated(negation, actor, sentence):
    try:
        shown = read_prompt(sentence.format(f"{negation} {actor}")).prompt.actors
    except ValueError:
        return
    assert shown in ((), ("robot",))


@pytest.mark.parametrize(
    ("text", "actors"),
    [
        ("a fox on a beach. The fox runs", ("fox",)),
        ("a fox on a beach, then the happy fox sleeps", ("fox",)),
        ("a lion in a forest. That lion roars", ("cat",)),
        ("a fox and a cat on a beach. The cat jumps", ("fox", "cat")),
    ],
)
def test_who_is_named_again_is_shown_once(text, actors):
    assert read_prompt(text).prompt.actors == actors


@pytest.mark.parametrize("second", ["and the fox", "and a fox", "next to the other fox", "near another fox"])
def test_a_second_of_a_kind_is_still_refused(second):
    with pytest.raises(ValueError, match="two of a kind"):
        read_prompt(f"a fox {second} on a beach")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a xylophone and a trumpet in a kitchen",
            "'xylophone', 'trumpet', 'kitchen'; actors: fox.*public models accept any prompt .`recap list`",
        ),
        ("a penguine on a beech", "'penguine', 'beech'; did you mean 'penguin' for 'penguine', 'beach' for"),
        ("penguine beach", "did you mean 'penguin'"),
        ("a wedding on a beach", "'wedding'"),
        ("a family on a beach", "'family'"),
        ("a fox in a city in the snow", "more than one scene: city, snow"),
        ("a cute fox in a city in the snow", "more than one scene: city, snow"),
        ("a fox on the grass near a lake", r"'grass' \(meadow\), 'lake' \(beach\)"),
        ("a cute fox in a city by day at night", "more than one time"),
        ("a cute fox in an empty city", "empty"),
        ("a fox and a cute fox in a city", "two of a kind"),
        ("a lion and a lion in a city", "second cat"),
        ("a cute fox, a cat, a dog and a duck in a city", "at most 3"),
        ("", "names no scene; say where: on a beach"),
        ("a", "names no scene"),
        ("no fox", "names no scene"),
        ("very happy", "names no scene"),
        ("<b>a fox</b> on a beach", "'b'"),
        ("狐狸在海滩上", "狐狸在海滩上"),
        ("a fox " * 1000, "6000 characters|at most 3"),
        ("happy fox on a beach " * 200, f"4200 characters, and at most {LONGEST}"),
    ],
)
def test_refusals_name_everything_at_once(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        read_prompt(text)
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize("word", ["lyon", "liom", "tvo", "reb", "nown"])
def test_guesses_by_spelling_are_not_wild(word):
    """A low bar offered a balloon for a lion, and a town for "two"."""
    with pytest.raises(ValueError, match=f"'{word}'; actors"):
        read_prompt(f"a {word} and a fox in a forest")


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=200),
        st.text(st.characters(categories=["Cc", "Cf", "Cs", "Lo", "Zl"]), max_size=60),
        st.text(min_size=1, max_size=12).map(lambda text: text * 500),
        st.lists(
            st.one_of(
                st.sampled_from(
                    [
                        *ACTORS,
                        *SCENES,
                        *TIMES,
                        *OTHER_NOUNS,
                        *(w for kind in ("not", "negation", "doubt") for w in TABLES["exact"][kind].split()),
                    ]
                ),
                st.sampled_from(
                    ["a", "and", "or", "two", "red", "<b>", "&amp;", ",", ".", "-", "'", "no", "on"]
                ),
                st.text(max_size=8),
            ),
            max_size=25,
        ).map(" ".join),
    )
)
def test_anything_is_read_or_refused_in_one_line(text):
    try:
        reading = read_prompt(text)
    except ValueError as refused:
        message = str(refused)
        assert "prompt" in message or "actors" in message
        lines = (message,)
    else:
        assert len(token_ids(reading.prompt)) == 5
        lines = reading.notices
    for line in lines:
        assert len(line) < 3000 and line.isprintable()


def test_tables_and_training_stay_strict():
    for text in (
        "a cute fox on a beach",
        "a fox",
        "a lion on a beach",
        "two foxes on a beach",
        "a beach, no fox",
    ):
        with pytest.raises(ValueError, match="prompt"):
            parse_prompt(text)
        with pytest.raises(ValueError, match="prompt"):
            token_ids(text)
        read_prompt(text)


def test_a_reader_gives_every_notice_once():
    lines = []
    reader = PromptReader(lines.append)
    for text in ("a lion on a beach", "a red lion", "a lion on a beach", "a red fox"):
        reader(text)
    assert len(lines) == len(set(lines)) == 3


def test_the_backbone_generates_what_was_read_and_reports_it_once():
    lines = []
    backbone = EmbeddedConfig().build(
        device="cpu", dtype=torch.float32, prompts=("a cute lion",), notice=lines.append
    )
    assert lines == [], "there are no notices before prompts are read"
    meant = backbone.condition(("a cat on a beach",))
    for prompts in (("a cute lion",), ("a cute lion", "a cute lion")):
        asked = backbone.condition(prompts)
        for one, other in zip(asked.keys + asked.values, meant.keys + meant.values, strict=True):
            assert torch.equal(one[:1], other)
    assert [line.split(":")[1].strip() for line in lines] == [
        "'cute'",
        "'lion' is not in the vocabulary",
        "no scene is named",
    ]
