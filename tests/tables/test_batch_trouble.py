"""What goes wrong while batches are drawn costs the runs it concerns, and nothing else."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch

from recap.eval.scores import Score
from recap.io.files import alone_in
from recap.tables import about, batches
from recap.tables.batches import Batches, Settings, main
from recap.tables.drawing import Scored, Task, draw_batch
from recap.tables.drawn_file import RESULTS, append_lines, mend, read_packed
from recap.tables.recipes import Ask, find_recipe

ASK = Ask(backbone="untrained", prompts=2, seeds=2, seconds=4.5)
WORDS = ["--backbone", "untrained", "--prompts", "2", "--seeds", "2", "--seconds", "4.5", "--embedder", "hsv",
         "--device", "cpu", "--scorers", "1", "--tables", "bank"]  # fmt: skip


def opened(out, tables=("bank",), **settings):
    out.mkdir(exist_ok=True)
    return Batches(tables, ASK, "hsv", out, Settings(**settings), None)


def waiting(made, out, outcomes):
    """Give each of the first runs a future that has ended so."""
    for draw, outcome in zip(made._draws, outcomes, strict=False):
        future, file = Future(), out / f"{draw.key}.npy"
        file.touch()
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        made._waiting[future] = draw, Task(file, 16.0, [], {}, None)


SCORED = Scored({"bank": [Score("bank_overlap", 1.0, "native")]}, None, 1.0)


def told(out, what):
    return [line[what] for line in read_packed(out / RESULTS) if what in line]


def test_a_score_that_fails_costs_its_run_alone(tmp_path, capsys):
    made = opened(tmp_path)
    waiting(made, tmp_path, [SCORED, ValueError("no face"), SCORED])
    key = made._draws[1].key
    made._take_in(0)
    assert len(told(tmp_path, "run")) == made._scored == 2 and made._left == 2
    assert key in (said := capsys.readouterr().out) and "ValueError: no face" in said
    assert told(tmp_path, "gave_up") == [{"table": "bank", "row": "recap", "why": "ValueError: no face"}]
    assert not list(tmp_path.glob("*.npy")) and key not in told(tmp_path, "run")


def test_scorers_that_are_gone_end_the_call_after_what_is_finished(tmp_path):
    made = opened(tmp_path)
    waiting(made, tmp_path, [BrokenProcessPool("killed"), SCORED, BrokenProcessPool("killed"), SCORED])
    with pytest.raises(BrokenProcessPool):
        made._take_in(0)
    assert len(told(tmp_path, "run")) == made._scored == 2 and made._left == 2


def test_cores_are_those_a_container_may_use(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000")
    monkeypatch.setattr(about, "QUOTA", quota)
    monkeypatch.setattr(about.os, "cpu_count", lambda: 64)
    assert about.cores() == 1
    called = []
    monkeypatch.setattr(batches, "use_fair_threads", lambda: called.append("threads"))
    with pytest.raises(ValueError, match="--share"):
        main([*WORDS, "--out", str(tmp_path / "x"), "--share", "3/2"])
    assert called == ["threads"]


def test_shares_of_attention_are_drawn_by_the_readable_path(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "accelerate", lambda plain: f"fast {plain}")
    made = opened(tmp_path, ("identity", "lambda"))
    made._plain = "plain"
    paths = {}
    for draw in made._draws:
        made._take_path(draw.kind)
        paths.setdefault(made._backbone, set()).update((each.table, each.job.row) for each in draw.wanted)
    assert {row for table, row in paths["plain"] if table == "lambda"} == {
        row.name for row in find_recipe("lambda").rows
    }
    assert paths["fast plain"] == {("identity", row) for row in ("none", "sink", "sink, lambda 5")}


def test_only_a_folder_can_be_gone_on_with(tmp_path):
    (tmp_path / RESULTS).touch()
    for place in (tmp_path / "nothing", tmp_path / RESULTS):
        with pytest.raises(ValueError, match=r"--resume .* no such folder"):
            main([*WORDS, "--out", str(tmp_path / "out"), "--resume", str(place)])
    assert not (tmp_path / "out").exists()


def test_a_file_with_no_whole_line_is_begun_anew(tmp_path):
    file = tmp_path / RESULTS
    whole = gzip.compress(b'{"run": "a"}\n')
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        mend(file)
        append_lines(file, [{"run": "b"}])
        assert {"run": "b"} in read_packed(file)
    mend(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def refusal(use, file) -> str:
    """What is said against a file; nothing if it can be used."""
    try:
        use(file)
    except ValueError as error:
        return str(error)
    return ""


def packed_parts(file, count=4):
    """A file of so many parts, of several lines each, and where they end."""
    ends = [0]
    for part in range(count):
        append_lines(file, [{"run": f"{part} {line}", "value": part / 7 + line / 3} for line in range(20)])
        ends.append(file.stat().st_size)
    return ends


def test_a_damaged_part_among_whole_ones_is_refused_and_nothing_is_lost(tmp_path):
    """Wherever the byte lies, the parts after it are neither left out without a word nor written away."""
    ends = packed_parts(tmp_path / "whole.gz")
    whole, file = (tmp_path / "whole.gz").read_bytes(), tmp_path / RESULTS
    lines, refused = read_packed(tmp_path / "whole.gz"), 0
    for part in range(3):
        for place in range(ends[part], ends[part + 1]):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            file.write_bytes(damaged)
            said = refusal(read_packed, file)
            if not said:  # bytes that mean nothing, as when it was packed
                assert read_packed(file) == lines
                continue
            assert all(word in said for word in (RESULTS, f"part {part + 1} is damaged", "copy it again"))
            assert refusal(mend, file) == said and file.read_bytes() == damaged
            refused += 1
    assert refused > 0.9 * ends[3]


def test_a_damaged_last_part_is_left_out_unless_it_is_all_there_is(tmp_path):
    file = tmp_path / RESULTS
    ends = packed_parts(file)
    lines = read_packed(file)
    damaged = bytearray(file.read_bytes())
    damaged[(ends[3] + ends[4]) // 2] ^= 0x10
    file.write_bytes(damaged)
    assert read_packed(file) == lines[:60]
    mend(file)  # which leaves one part of all
    assert read_packed(file) == lines[:60]
    damaged = bytearray(file.read_bytes())
    damaged[-20] ^= 0x10
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="part 1"):
        mend(file)
    assert file.read_bytes() == damaged


def test_whole_lines_of_a_part_that_was_cut_short_are_kept(tmp_path):
    file = tmp_path / RESULTS
    packed_parts(file)
    lines = read_packed(file)
    mend(file)
    file.write_bytes(file.read_bytes()[:-40])
    kept = read_packed(file)
    assert kept == lines[: len(kept)] and 20 < len(kept) < 80


def test_what_is_no_json_is_refused_in_any_part(tmp_path):
    file = tmp_path / RESULTS
    packed_parts(file, 1)
    for text, word in ((b"no json\n", "part 2"), (b"\xff\n", "part 2"), (b"[1]\n", "no object")):
        file.write_bytes(file.read_bytes() + gzip.compress(text))
        with pytest.raises(ValueError, match=word):
            read_packed(file)
        file.unlink()
        packed_parts(file, 1)


def test_two_processes_do_not_share_a_folder(tmp_path):
    with (
        alone_in(tmp_path, "", "", ""),
        pytest.raises(ValueError, match=r"--out .* another process .* of its own"),
    ):
        main([*WORDS, "--out", str(tmp_path)])
    assert not (tmp_path / RESULTS).exists()


def test_pictures_of_what_was_given_up_are_cleared_away(tmp_path, monkeypatch):
    def fails(batch, backbone, place, embedder):
        for draw in batch:
            (place / f"{draw.key}.npy").touch()
            (place / f"{draw.key}.vectors.npy").touch()
        raise RuntimeError("broken")

    monkeypatch.setattr(batches, "draw_batch", fails)
    made = opened(tmp_path)
    made._plain = made._backbone = None
    assert made._draw(made._draws, tmp_path, None) == []
    assert not list(tmp_path.glob("*.npy"))
    assert told(tmp_path, "gave_up") == [{"table": "bank", "row": "recap", "why": "RuntimeError: broken"}]


@pytest.mark.parametrize("fits", [1, 0])
def test_too_many_rows_are_drawn_by_halves(tmp_path, monkeypatch, fits):
    sizes = []

    def narrow(batch, backbone, place, embedder):
        sizes.append(len(batch))
        if len(batch) > fits:
            raise torch.OutOfMemoryError("no room")
        return [f"task of {draw.key}" for draw in batch]

    monkeypatch.setattr(batches, "draw_batch", narrow)
    made = opened(tmp_path)
    made._plain = made._backbone = None
    drawn = made._draw(made._draws[:3], tmp_path, None)
    assert sizes == [3, 2, 1, 1, 1]
    assert [draw for draw, _ in drawn] == (made._draws[:3] if fits else [])
    assert all(task == f"task of {draw.key}" for draw, task in drawn)
    assert len(told(tmp_path, "gave_up")) == (0 if fits else 3)


def test_a_whole_call_by_halves(tmp_path, monkeypatch):
    def narrow(batch, *rest):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("no room")
        return draw_batch(batch, *rest)

    monkeypatch.setattr(batches, "draw_batch", narrow)
    assert main([*WORDS, "--out", str(tmp_path)]) and len(told(tmp_path, "run")) == 4


def test_time_is_reckoned_by_rounds_of_scorers_and_shorter_batches_may_fit(tmp_path, monkeypatch):
    made = opened(tmp_path, scorers=8, minutes=0.5)
    made._scoring_s = [60.0]
    assert not made._time_for(
        made._draws[:1]
    )  # one run takes a minute, however many could be scored beside it
    made = opened(tmp_path / "b", ("bank", "retention-5min"))
    alike = [made._draws[-1:], made._draws[:1], made._draws[-2:-1]]
    drawn = []
    monkeypatch.setattr(made, "_time_for", lambda batch: batch[0].seconds < 5 and batch is alike[1])
    monkeypatch.setattr(made, "_take_path", lambda kind: None)
    monkeypatch.setattr(made, "_possible", lambda batch: True)
    monkeypatch.setattr(made, "_draw", lambda batch, *rest: drawn.append(batch) or [])
    made._draw_all(alike, tmp_path, None)
    assert drawn == [alike[1]]


def test_the_exit_status_tells_that_runs_are_left(tmp_path):
    words = [
        sys.executable,
        "-m",
        "recap.tables.batches",
        *WORDS,
        "--minutes",
        "1e-9",
        "--out",
        str(tmp_path),
    ]
    assert subprocess.run(words, check=False).returncode == 3


def test_rows_that_this_version_cannot_draw_are_told(tmp_path, monkeypatch):
    recipe = find_recipe("bank")
    more = replace(recipe, rows=(*recipe.rows, replace(recipe.rows[0], name="new", memory={"name": "new"})))
    monkeypatch.setattr(batches, "find_recipe", lambda name: more)
    made = opened(tmp_path)
    (left,) = told(tmp_path, "left_out")
    assert (left["table"], left["row"]) == ("bank", "new") and "no such memory" in left["why"]
    assert made._left == 4 and json.dumps(left)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--rows", "0"], "--rows"), (["--scorers", "0"], "--scorers"), (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"), (["--share", "3/2"], "--share"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_before_a_folder_is_made(tmp_path, words, field):
    with pytest.raises(ValueError, match=f"{field} is"):
        main(["--tables", "identity", "--device", "cpu", "--out", str(tmp_path / "new"), *words])
    assert not (tmp_path / "new").exists()


def test_a_file_is_no_folder_for_results(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"--out .* is a file"):
        main(["--tables", "identity", "--device", "cpu", "--out", str(tmp_path / "file")])
    assert (tmp_path / "file").read_text() == "mine"
