"""Votes: what the page wrote is read, whatever else is refused by file and line, and nothing is lost."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from recap.eval.study.box import BallotBox
from recap.eval.study.votes import TIE, A, B, read_ballots, seal
from tests.study.conftest import Writer, careless, fill, paper_key, session_of

ANSWERS = {"consistency": A, "motion": TIE, "overall": B}
KEY = paper_key(per_rival=2, identical=1, repeats=1)


def writer(number=1, rater="Anna", votes=3):
    made = Writer(KEY.study, session_of(number), rater)
    for trial in range(votes):
        made.vote(trial, ANSWERS)
    return made


def read(tmp_path, *files):
    paths = []
    for number, data in enumerate(files):
        paths.append(tmp_path / f"votes{number}.jsonl")
        paths[-1].write_bytes(data)
    return read_ballots(paths, KEY.study)


def test_votes_are_read_and_the_last_answer_counts(tmp_path):
    made = writer(rater="  Änna \u0394  ")
    made.vote(0, {**ANSWERS, "motion": B}, took_s=9)
    (ballot,) = read(tmp_path, made.data)
    assert (
        ballot.rater == "Änna \u0394" and ballot.session == session_of(1) and set(ballot.answers) == {0, 1, 2}
    )
    assert ballot.answers[0]["motion"] == B and ballot.answers[1] == ANSWERS and ballot.took_s[0] == 9


def test_the_same_votes_in_two_files_and_in_any_order_count_once(tmp_path):
    one, two = writer(1, "Anna"), writer(2, "Ben")
    mixed = b"\n".join([*two.lines[::-1], *one.lines]) + b"\r\n"
    assert len(read(tmp_path, mixed, one.data, one.data[: len(one.lines[0]) + 1])) == 2


def test_two_raters_with_one_name_are_kept_apart(tmp_path):
    names = [
        ballot.rater
        for ballot in read(tmp_path, writer(1).data, writer(2, "anna").data, writer(3, "Ben").data)
    ]
    assert names == [f"Anna ({session_of(1)[:6]})", f"anna ({session_of(2)[:6]})", "Ben"]


def changed(data, **fields):
    """The last line, written again by somebody who knows the checksum, with other values."""
    *lines, last = data.splitlines()
    says = json.loads(last) | fields
    del says["check"]
    return (
        b"\n".join([*lines, seal(says, json.loads(lines[-1])["check"] if lines else KEY.study.digest)])
        + b"\n"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trial": 99}, "trial is 99"),
        ({"trial": -1}, "trial is -1"),
        ({"trial": True}, "trial is True"),
        ({"answers": {**ANSWERS, "motion": "C"}}, "an answer is 'C'"),
        ({"answers": {**ANSWERS, "motion": ["A"]}}, "an answer is"),
        ({"answers": {"motion": A}}, "answers are to 'motion'"),
        ({"took_s": -1}, "took_s is '-1'"),
        ({"took_s": "long"}, "took_s"),
        ({"took_s": float("nan")}, "took_s"),
        ({"n": 7}, "vote 3 is missing"),
        ({"n": 10**9}, "n is"),
        ({"session": "x"}, "session is 'x'"),
        ({"v": 2}, "v is 2"),
        ({"more": 1}, "there is more"),
        ({"study": "0" * 16}, "is of the study"),
    ],
)
def test_impossible_values_are_refused_with_file_and_line(tmp_path, fields, said):
    with pytest.raises(ValueError, match="line 4") as refused:
        read(tmp_path, changed(writer().data, **fields))
    assert said in str(refused.value) and "votes0.jsonl" in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [{"rater": " "}, {"rater": "x" * 61}, {"rater": "a\nb"}, {"rater": 3}, {"sheet": 99}, {"at": "now"}],
)
def test_impossible_raters_are_refused(tmp_path, fields):
    with pytest.raises(ValueError, match=r"line 1.*no page wrote this"):
        read(tmp_path, changed(writer(votes=0).data, **fields))


def test_a_changed_answer_a_lost_line_and_a_conflict_are_found(tmp_path):
    made = writer()
    edited = made.data.replace(b'"motion":"tie"', b'"motion":"B"', 1)
    with pytest.raises(ValueError, match=r"line 2.*was changed"):
        read(tmp_path, edited)
    without = made.lines[0] + b"\n" + made.lines[2] + b"\n"
    with pytest.raises(ValueError, match=r"line 2.*vote 1 is missing"):
        read(tmp_path, without)
    other = Writer(KEY.study, session_of(1), "Anna")
    other.vote(0, {**ANSWERS, "overall": A})
    with pytest.raises(ValueError, match=r"votes1.jsonl, line 2.*votes0.jsonl, line 2"):
        read(tmp_path, made.data, other.data)
    renamed = made.data.replace(b'"rater":"Anna"', b'"rater":"Ben"')
    with pytest.raises(ValueError, match=r"line 1.*was changed"):
        read(tmp_path, renamed)


def test_files_that_are_no_votes_are_refused(tmp_path):
    for data in (b"", b"\n\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000, b'{"v":1}\n', b"x" * 20_000):
        with pytest.raises(ValueError, match=r"votes0\.jsonl"):
            read(tmp_path, data)
    with pytest.raises(ValueError, match="cannot be read"):
        read_ballots([tmp_path / "none"], KEY.study)


DATA = writer(1).data + writer(2, "Ben").data


@settings(max_examples=150, deadline=None)
@given(data=some.data())
def test_no_change_of_bytes_passes_as_other_votes(tmp_path_factory, data):
    """Any change is refused in words, or leaves every vote that is read as it was."""
    at = data.draw(some.integers(0, len(DATA)))
    cut = data.draw(some.integers(0, 40))
    put = data.draw(
        some.one_of(some.binary(max_size=12), some.sampled_from([b"\n", b'"A"', b'"B"', b'"tie"', b"1"]))
    )
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_bytes(DATA)
    whole = {ballot.session: ballot for ballot in read_ballots([path], KEY.study)}
    path.write_bytes(DATA[:at] + put + DATA[at + cut :])
    try:
        found = read_ballots([path], KEY.study)
    except ValueError:
        return
    for ballot in found:
        true = whole[ballot.session]
        assert ballot.rater == true.rater and ballot.sheet == true.sheet
        assert ballot.answers.items() <= true.answers.items()


def test_the_box_keeps_votes_over_restarts_and_takes_each_once(tmp_path):
    path, made = tmp_path / "new" / "votes.jsonl", writer()
    box = BallotBox(path, KEY.study)
    assert box.add(made.lines[0]) == 1 and box.add(b"\n".join(made.lines[:3])) == 3
    # Killed while it wrote: half a line, which the page sends again.
    path.write_bytes(path.read_bytes() + made.lines[3][:50])
    with pytest.raises(ValueError, match=r"last line': is half a line.*study serve"):
        read_ballots([path], KEY.study)
    box = BallotBox(path, KEY.study)
    assert path.read_bytes() == b"".join(line + b"\n" for line in made.lines[:3])
    assert box.add(made.data) == 4 and path.read_bytes() == made.data
    before = path.read_bytes()
    for bad in (
        b"",
        b"{}",
        writer(2, " ANNA").data,
        made.lines[1].replace(b"tie", b"B"),
        writer(3, "Ben").lines[2],
    ):
        with pytest.raises(ValueError, match=r"votes|rater"):
            box.add(bad)
    with pytest.raises(ValueError, match="one rater's"):
        box.add(writer(4, "Cem").data + writer(5, "Dan").data)
    assert path.read_bytes() == before
    assert box.least_used_sheet() == 1
    # What was refused has left nothing behind: the names are free.
    assert box.add(writer(4, "Cem").data) == 4 and box.add(writer(6, "Ben").data) == 4
    assert {ballot.rater for ballot in read_ballots([path], KEY.study)} == {"Anna", "Cem", "Ben"}


@pytest.mark.parametrize("made", [b'{\n "key": 1\n}', b"notes without an end", b"one line\nand another"])
def test_a_file_that_is_no_votes_is_refused_and_left_as_it_is(tmp_path, made):
    """A key, given by mistake, lost its last line."""
    (tmp_path / "key.json").write_bytes(made)
    with pytest.raises(ValueError, match="is not a line of votes"):
        BallotBox(tmp_path / "key.json", KEY.study)
    assert (tmp_path / "key.json").read_bytes() == made


def test_a_vote_whose_end_of_line_an_editor_took_is_kept(tmp_path):
    path, made = tmp_path / "votes.jsonl", writer()
    path.write_bytes(made.data.removesuffix(b"\n"))
    box = BallotBox(path, KEY.study)
    assert path.read_bytes() == made.data
    made.vote(3, ANSWERS)
    assert box.add(made.data) == 5 and path.read_bytes() == made.data
    # Half a line that ends as JSON does is half a line all the same.
    half = made.lines[4].partition(b',"took_s"')[0]
    assert half.endswith(b"}")
    path.write_bytes(b"".join(line + b"\n" for line in made.lines[:4]) + half)
    assert BallotBox(path, KEY.study).add(made.data) == 5 and path.read_bytes() == made.data


def test_a_full_disk_leaves_whole_lines_and_the_same_votes_are_taken_later(tmp_path, monkeypatch):
    path, made = tmp_path / "votes.jsonl", writer()
    box = BallotBox(path, KEY.study)
    box.add(made.lines[0])
    with monkeypatch.context() as patch:

        def full(_):
            raise OSError(28, "No space left on device")

        patch.setattr("recap.eval.study.box.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            box.add(made.lines[1])
    assert path.read_bytes() == made.lines[0] + b"\n"
    assert box.add(made.data) == 4 and path.read_bytes() == made.data


def test_the_box_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(BallotBox, "MOST_RATERS", 2)
    box = BallotBox(tmp_path / "votes.jsonl", KEY.study)
    chance = random.Random(0)
    for number in range(2):
        fill(made := Writer(KEY.study, session_of(number), f"r{number}"), KEY, careless(chance))
        box.add(made.data)
    with pytest.raises(ValueError, match="raters is 2"):
        box.add(writer(9, "late").data)
