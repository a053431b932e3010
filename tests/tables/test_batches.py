"""Tables drawn in batches: each run once, scored as `recap reproduce` scores it, and made a table elsewhere."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recap.eval.embedders import HsvEmbedder, build_embedder
from recap.eval.sampling import Drawn
from recap.io.video import open_clip
from recap.run import build_backbone
from recap.tables.batches import USUAL, main
from recap.tables.drawing import draw_batch, score_drawn
from recap.tables.drawn_file import RESULTS, append_lines, look_line, look_of, read_packed
from recap.tables.draws import batches_of, collect_draws
from recap.tables.imported import import_table
from recap.tables.job import draw_and_score, job_of
from recap.tables.recipes import Ask, find_recipe, plan_runs
from recap.tables.scoring import Seen, as_result, score
from recap.trace import read_trace

SMALL = Ask(backbone="untrained", prompts=2, seeds=2, seconds=4.5, flow="classical")
WORDS = ["--backbone", "untrained", "--prompts", "2", "--seeds", "2", "--seconds", "4.5", "--embedder", "hsv",
         "--device", "cpu", "--scorers", "1"]  # fmt: skip
TABLES = ["retention", "bank", "reappearance"]


def test_what_several_tables_want_is_drawn_once():
    tables = [table for table in USUAL if table != "entering"]  # whose scripts differ in their timing, too
    draws = collect_draws(tables, Ask(prompts=2, seeds=1), "hsv")
    kinds = {draw.kind for draw in draws}
    assert len(draws) == 2 * len(kinds) and len({draw.key for draw in draws}) == len(draws)
    wanted = sum(len(list(plan_runs(find_recipe(t), Ask(prompts=2, seeds=1)))) for t in tables)
    assert sum(len(draw.wanted) for draw in draws) == wanted > 1.7 * len(draws)
    ours = next(draw for draw in draws if any(each.table == "bank" for each in draw.wanted))
    assert {"main", "rivals", "capacity", "lambda", "identity"} <= {each.table for each in ours.wanted}
    assert ours.config.trace_offered and "bank" in ours.measures  # whoever came first did not ask for it


def test_batches_hold_one_kind_and_are_even():
    draws = collect_draws(["retention"], Ask(prompts=5, seeds=5), "hsv")
    batches = list(batches_of(draws, 10))
    assert [len(batch) for batch in batches] == [9, 9, 7] * 4
    assert all(len({draw.kind for draw in batch}) == 1 for batch in batches)
    with pytest.raises(ValueError, match="one by one"):
        collect_draws(["time"], Ask(), "hsv")


def test_scripts_of_one_timing_fill_a_batch():
    batches = list(batches_of(collect_draws(["entering"], Ask(), "hsv"), 50))
    assert [len(batch) for batch in batches] == [20] * 5 * len(find_recipe("entering").rows)


@pytest.fixture(scope="module")
def ours():
    """Our runs of two prompts of a script with cuts, and their backbone."""
    draws = collect_draws(["reappearance"], replace(SMALL, seeds=1), "hsv")
    alike = [draw for draw in draws if draw.wanted[0].job.row == "recap"]
    return alike, build_backbone(alike[0].config)


def test_a_row_of_a_batch_is_the_run_that_recap_reproduce_draws(ours, tmp_path):
    """But for the encoder, which one has passed and the other has not."""
    draws, backbone = ours
    tasks = draw_batch(draws, backbone, tmp_path)
    for draw, task in zip(draws, tasks, strict=True):
        folder = tmp_path / draw.key
        alone = draw_and_score(json.loads(draw.wanted[0].job.payload), str(folder))["scores"]
        shown, clip = np.load(task.pictures), open_clip(folder / "video.mp4")
        decoded = np.stack(list(clip.pictures()))
        assert shown.shape == decoded.shape
        apart = [np.abs(np.load(each.pictures).astype(int) - decoded).mean() for each in tasks]
        assert min(apart) == np.abs(shown.astype(int) - decoded).mean() < 8  # levels, of noise through H.264
        assert max(apart) > 2 * min(apart)  # the other row
        lines = read_trace(folder / "trace.jsonl")
        assert [line.prompts for line in lines] == [line.prompts for line in task.trace]
        for mine, theirs in zip(task.trace, lines, strict=True):
            assert mine.admitted[0].keys() == theirs.admitted[0].keys()
            assert mine.shares["current"] == pytest.approx(theirs.shares["current"], abs=1e-4)
        scored = as_result(score_drawn(task).scores, task.data["measures"])["scores"]
        assert scored.keys() == alone.keys()
        assert scored["bank_slots_from_B"] == alone["bank_slots_from_B"]


def test_pictures_in_memory_score_as_the_same_pictures_in_a_file(tmp_path):
    recipe = replace(
        find_recipe("identity"), measures=("dynamics", "identity", "retention", "motion", "length")
    )
    planned = next(plan_runs(recipe, replace(SMALL, seconds=6.0)))
    job = job_of(planned, recipe, "hsv")
    from_file = draw_and_score(json.loads(job.payload), str(tmp_path))
    clip = open_clip(tmp_path / "video.mp4")
    shown = Drawn(np.stack(list(clip.pictures())), clip.fps)
    seen = Seen(job.data, shown, read_trace(tmp_path / "trace.jsonl"))
    assert as_result(score(seen, recipe.measures), recipe.measures) == from_file


def test_what_was_embedded_while_drawing_is_what_scorers_would_see(ours, tmp_path):
    draws, backbone = ours
    plain = draw_batch(draws[:1], backbone, tmp_path)[0]
    known = draw_batch(draws[:1], backbone, tmp_path, HsvEmbedder())[0]
    assert plain.vectors is None and known.vectors is not None and known.vectors.is_file()
    assert score_drawn(known).scores == score_drawn(plain).scores


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Three tables in two calls: one for fewer seeds, then all, in two shares of which one had less to do."""
    place = tmp_path_factory.mktemp("drawn")
    few = ["2" if word == "2" and WORDS[i - 1] != "--seeds" else word for i, word in enumerate(WORDS)]
    few[few.index("--seeds") + 1] = "1"
    assert main([*few, "--tables", *TABLES, "--rows", "2", "--out", str(place / "first")])
    before = len(read_packed(place / "first" / RESULTS))
    for share in ("1/2", "2/2"):
        out = place / share[0]
        words = [*WORDS, "--tables", *TABLES, "--rows", "3", "--share", share, "--out", str(out)]
        assert main([*words, "--resume", str(place)])
    return place, before


def runs(place: Path) -> list[str]:
    return [
        line["run"] for file in sorted(place.rglob(RESULTS)) for line in read_packed(file) if "run" in line
    ]


def test_calls_add_up_and_nothing_is_drawn_twice(drawn):
    place, before = drawn
    found = runs(place)
    assert before == 1 + 2 * 8 and len(found) == len(set(found)) == 4 * 8  # 8 kinds for 9 rows of tables
    assert not any(place.rglob("*.npy"))


@pytest.mark.parametrize("table", TABLES)
def test_an_imported_table_is_a_table(drawn, tmp_path, table):
    done = import_table(table, drawn[0], tmp_path / table)
    written = json.loads((tmp_path / table / "table.json").read_text())
    assert done.num_runs == written["about"]["runs"] == 4 * len(find_recipe(table).rows)
    assert (written["about"]["prompts"], written["about"]["seeds"]) == (2, 2)
    assert written["about"]["judged"] == "pictures as drawn, in batches" and written["about"]["commit"]
    lines = [json.loads(line) for line in (tmp_path / table / "results.jsonl").read_text().splitlines()]
    jobs = [job_of(each, find_recipe(table), "hsv") for each in plan_runs(find_recipe(table), SMALL)]
    assert [line["key"] for line in lines] == [job.key for job in jobs]
    page = (tmp_path / table / "index.html").read_text()
    assert "data:image/png" in page and "<video" not in page
    banks = [figure for figure in written["figures"] if "bank of" in figure]
    assert len(banks) == (table != "retention") and (table == "retention") != ("bank of" in page)
    if table == "bank":
        cells = {cell["measure"]: cell["value"] for cell in written["cells"]}
        assert cells["bank_overlap_lowest"]["mean"] == 1 and cells["bank_overlap"]["n"] == 4
        assert all(line["scores"]["bank_overlap"]["details"]["complete"] for line in lines)


def test_fewer_may_be_imported_and_more_is_refused(drawn, tmp_path):
    assert import_table("bank", drawn[0] / "first" / RESULTS, tmp_path / "a", prompts=1).num_runs == 1
    with pytest.raises(ValueError, match=r"8 of 16 runs of retention are missing.* --seeds"):
        import_table("retention", drawn[0] / "first" / RESULTS, tmp_path / "b", prompts=2, seeds=2)
    with pytest.raises(ValueError, match="nothing of the table 'motion'"):
        import_table("motion", drawn[0], tmp_path / "c", prompts=2)
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()


def test_another_question_is_not_mixed_in(drawn, tmp_path):
    words = ["9" if word == "4.5" else word for word in WORDS]
    with pytest.raises(ValueError, match=r"--resume is .* 'seconds': 4.5"):
        main([*words, "--tables", "bank", "--out", str(tmp_path / "x"), "--resume", str(drawn[0])])
    with pytest.raises(ValueError, match="--share is '3/2'"):
        main([*WORDS, "--tables", "bank", "--out", str(tmp_path / "y"), "--share", "3/2"])


def test_a_kill_costs_the_last_part_at_most(tmp_path):
    file = tmp_path / RESULTS
    append_lines(file, [{"run": "a"}, {"run": "b"}])
    whole = file.read_bytes()
    append_lines(file, [{"run": "c"}])
    for cut in range(len(whole), len(file.read_bytes())):
        (tmp_path / "cut").write_bytes(file.read_bytes()[:cut])
        assert [line["run"] for line in read_packed(tmp_path / "cut")][:2] == ["a", "b"]
    (tmp_path / "cut").write_bytes(b"nothing packed")
    with pytest.raises(ValueError, match="cannot be read"):
        read_packed(tmp_path / "cut")


def test_no_time_means_no_batch_and_a_memory_without_weights_is_left_out(tmp_path, monkeypatch):
    words = [*WORDS, "--tables", "admission", "--rows", "2"]
    assert not main([*words, "--minutes", "1e-9", "--out", str(tmp_path / "a")])
    assert not runs(tmp_path / "a")
    recipe = find_recipe("admission")
    kept = tuple(row for row in recipe.rows if row.name in ("diversity", "recap"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("recap.tables.draws.find_recipe", lambda name: replace(recipe, rows=kept))
    assert main([*words, "--prompts", "1", "--seeds", "1", "--out", str(tmp_path / "b")])
    (left,) = [line["left_out"] for line in read_packed(tmp_path / "b" / RESULTS) if "left_out" in line]
    assert (left["table"], left["row"]) == ("admission", "diversity") and "transformers" in left["why"]
    assert len(runs(tmp_path / "b")) == 1


def test_a_memory_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def fails(batch, *rest):
        if batch[0].config.memory.name == "sink":
            raise RuntimeError("out of memory, say")
        return draw_batch(batch, *rest)

    monkeypatch.setattr("recap.tables.batches.draw_batch", fails)
    words = [*WORDS, "--tables", "retention", "--prompts", "1", "--seeds", "1", "--out", str(tmp_path)]
    assert not main(words)
    assert "gave up: sink of retention: RuntimeError: out of memory, say" in capsys.readouterr().out
    assert len(runs(tmp_path)) == 2
    monkeypatch.undo()
    assert main(words) and len(runs(tmp_path)) == 4  # asked again, only what is missing is drawn


def test_looks_travel_unharmed(ours, tmp_path):
    draws, backbone = ours
    shown = replace(draws[0], shown=True)
    look = score_drawn(draw_batch([shown], backbone, tmp_path)[0]).look
    again = look_of(json.loads(json.dumps(look_line(shown, look))))
    assert np.array_equal(again.pictures, look.pictures) and again.moments == look.moments
    assert again.bank == look.bank and len(look.bank.cuts) == 3
    slots = [sum(held.values()) for held in look.bank.held]
    assert slots[-1] == backbone.spec.frame_tokens and len(look.bank.ends) == len(slots)


def test_a_machine_without_video_libraries_and_commands_can_draw():
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("av", "typer", "rich", "transformers", "torchvision"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import recap.tables.batches, recap.tables.drawing
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_packed_lines_are_gzip_that_any_tool_reads(drawn):
    text = gzip.decompress((drawn[0] / "first" / RESULTS).read_bytes()).decode()
    assert all(json.loads(line) for line in text.splitlines())
    assert build_embedder("hsv").backend in text
