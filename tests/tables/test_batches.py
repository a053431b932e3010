"""Runs generated in batches: each once, with the scores that it has alone; a failure costs those it concerns."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from tables_help import generated, jobs_of

from recap.eval.embedders import HsvEmbedder
from recap.eval.judged import JudgedRun
from recap.eval.judges.probe import Probe, load_probe
from recap.eval.metrics import find_measure
from recap.eval.sampling import InMemoryClip
from recap.io.report import SILENT
from recap.io.trace import read_trace
from recap.io.video import open_clip
from recap.run import generate
from recap.tables import batches
from recap.tables.ask import Ask
from recap.tables.batches import Batches, kind_of
from recap.tables.generating import (
    JUDGED,
    config_of,
    generate_and_score,
    generate_batch,
    score_generated,
)
from recap.tables.page import pack_look, unpack_look
from recap.tables.recipes import TABLES, find_recipe
from recap.tables.runner import ResultStore, Rules, run_jobs
from recap.tables.runs import TableRuns, plan_runs

SMALL = {"backbone": "untrained", "prompts": 2, "seconds": 4.5}


def test_what_several_tables_want_is_generated_once():
    # The scripts of `entering` and `recurrence` differ in their timing, too.
    apart = ("entering", "beyond-entering", "recurrence", "time", "retention-5min")
    tables = [name for name in TABLES if name not in apart]
    ask = Ask(prompts=2, seeds=1, device="cpu", embedder="hsv", flow="classical")
    plan = TableRuns([find_recipe(name) for name in tables], ask, {name: {} for name in tables})
    jobs = list(plan.jobs.values())
    asked = sum(len(list(plan_runs(find_recipe(name), ask))) for name in tables)
    assert sum(map(len, plan.tables.values())) == asked > 1.6 * len(jobs)
    ours = next(job for job in jobs if "bank" in job.wants and job.options["trace_offered"])
    assert {"dynamics", "retention", "identity", "attention", "content", "look"} <= ours.wants
    assert len(jobs) == 2 * len({canonical_kind(job) for job in jobs})


def canonical_kind(job):
    return kind_of(replace(job, wants=frozenset()))


def batches_of(table, rows, **asked):
    made = Batches.__new__(Batches)
    made._rows = rows
    return made.batches(jobs_of(table, **asked))


def test_batches_hold_one_kind_and_are_even():
    found = batches_of("retention", 10, prompts=5, seeds=5)
    # Of every row, the run that a page shows wants a look, which makes no other kind.
    assert [len(batch) for batch in found] == [9, 9, 7] * 4
    assert all(len({kind_of(job) for job in batch}) == 1 for batch in found)
    found = batches_of("entering", 50, prompts=20, seeds=5)
    # Prompts change at five different times, and nothing is cut.
    assert [len(batch) for batch in found] == [50] * 2 * len(find_recipe("entering").rows)


def test_rows_whose_prompts_change_at_different_times_are_generated_together(tmp_path):
    jobs = jobs_of("entering", "recap", backbone="untrained", prompts=2, seconds=9)
    scenes = [[shot["seconds"] for shot in job.data["config"]["shots"]] for job in jobs]
    assert scenes[0] != scenes[1] and kind_of(jobs[0]) == kind_of(jobs[1])
    both = generated(jobs, tmp_path)
    for job, together in zip(jobs, both, strict=True):
        (tmp_path / "alone").mkdir(exist_ok=True)
        (alone,) = generated([job], tmp_path / "alone")
        assert [line.prompts for line in together.trace] == [line.prompts for line in alone.trace]
        apart = np.load(together.pictures).astype(int) - np.load(alone.pictures)
        assert np.abs(apart).mean() < 0.1


def test_short_shots_and_cuts_keep_rows_apart():
    def kind(*shots):
        keys = ("seconds", "cut", "reread")
        (job,) = jobs_of("bank", backbone="untrained")
        listed = [{"prompt": "a", **dict(zip(keys, shot, strict=True))} for shot in shots]
        return kind_of(replace(job, data={**job.data, "config": {**job.data["config"], "shots": listed}}))

    plain = kind((3, True, False), (6, False, False))
    assert plain == kind((6, True, False), (3, False, False)) == kind((9, True, False))
    assert plain != kind((3, True, False), (6, True, False)) != kind((6, True, False), (3, True, False))
    assert plain != kind((3, True, False), (6, False, True))
    assert kind((0.3, True, False), (8.7, False, False)) != kind((8.7, True, False), (0.3, False, False))


def test_attention_is_measured_by_the_readable_path(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "accelerate", lambda plain: f"fast {plain}")
    monkeypatch.setattr(batches, "build_backbone", lambda config, notice: "plain")
    made = Batches(tmp_path, 4, 1)
    try:
        jobs = {table: jobs_of(table, **SMALL) for table in ("lambda", "identity")}
        made.batches([job for some in jobs.values() for job in some])
        paths = {table: {made._take_path(job) for job in some} for table, some in jobs.items()}
    finally:
        made.close()
    assert paths == {"lambda": {"plain"}, "identity": {"fast plain"}}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Our runs of two prompts of a script with cuts, generated as one batch."""
    jobs = jobs_of("reappearance", "recap", **SMALL)
    return jobs, generated(jobs, tmp_path_factory.mktemp("batch"))


def scored(job, run, folder, **options):
    return score_generated(replace(job, options={"generated": run, **options}), folder)


def test_a_row_of_a_batch_is_the_run_that_is_generated_alone(ours, tmp_path):
    jobs, runs = ours
    for index, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        folder = tmp_path / job.key
        generate(config_of(job), folder, reporter=SILENT)
        shown, clip = np.load(run.pictures), open_clip(folder / "video.mp4")
        decoded = np.stack(list(clip.pictures()))
        assert shown.shape == decoded.shape and not run.seconds
        apart = [np.abs(np.load(each.pictures).astype(int) - decoded).mean() for each in runs]
        # Levels of noise that went through H.264, and those of the other row.
        assert min(apart) == apart[index] < 8 and max(apart) > 2 * min(apart)
        for mine, theirs in zip(run.trace, read_trace(folder / "trace.jsonl"), strict=True):
            assert mine.prompts == theirs.prompts
            assert mine.admitted[0].keys() == theirs.admitted[0].keys()
            assert mine.shares["current"] == pytest.approx(theirs.shares["current"], abs=1e-4)
    alone = generate_and_score(jobs[0], tmp_path / "alone")
    together = scored(jobs[0], runs[0], tmp_path / "together")
    assert alone.keys() == together.keys() == jobs[0].wants
    assert alone["reappearance"]["bank_slots_from_B"] == together["reappearance"]["bank_slots_from_B"]
    for name, score in alone["reappearance"].items():
        assert together["reappearance"][name]["value"] == pytest.approx(score["value"], abs=0.02, nan_ok=True)


def test_a_run_that_is_alone_is_timed(tmp_path):
    (job,) = jobs_of("reappearance", "none", **SMALL | {"prompts": 1, "seconds": 1.5})
    (run,) = generated([job], tmp_path)
    assert len(run.seconds) == len(run.trace) and min(run.seconds) > 0


def test_what_was_embedded_while_generating_is_what_judges_would_see(ours, tmp_path):
    jobs, runs = ours
    (known,) = generated(jobs[:1], tmp_path, HsvEmbedder())
    assert not runs[0].backend and known.backend == HsvEmbedder().backend
    (plain,) = generated(jobs[:1], tmp_path)
    assert scored(jobs[0], known, tmp_path) == scored(jobs[0], plain, tmp_path)


@pytest.mark.slow
def test_what_the_probe_said_while_generating_is_what_it_says_later(tmp_path, monkeypatch):
    jobs = jobs_of("reappearance", "recap", prompts=1, seconds=3)
    (run,) = generated(jobs, tmp_path, probe=load_probe())
    with monkeypatch.context() as patched:
        patched.setattr(Probe, "judge", lambda *_: pytest.fail("it was asked again"))
        one = scored(jobs[0], run, tmp_path)
    run.pictures.with_suffix(JUDGED).unlink()
    two = scored(jobs[0], run, tmp_path)
    assert one.keys() == two.keys() and one["haunting"]
    for measure in set(one) - {"look"}:
        for name, score in two[measure].items():
            said = one[measure][name]["value"]
            assert said == pytest.approx(score["value"], abs=1e-3, nan_ok=True), (measure, name)


def test_pictures_in_memory_score_as_the_same_pictures_in_a_file(ours, tmp_path):
    jobs, _ = ours
    generate(config_of(jobs[0]), tmp_path / "run", reporter=SILENT)
    clip = open_clip(tmp_path / "run" / "video.mp4")
    shown, trace = (
        InMemoryClip(np.stack(list(clip.pictures())), clip.fps),
        read_trace(tmp_path / "run" / "trace.jsonl"),
    )
    for name in ("dynamics", "retention", "motion", "length"):
        one, two = (find_measure(name).score(JudgedRun(jobs[0].data, each, trace)) for each in (clip, shown))
        assert one == two


def test_looks_travel_unharmed(ours, tmp_path):
    jobs, runs = ours
    result = scored(jobs[0], runs[0], tmp_path)
    look = unpack_look(result["look"])
    again = unpack_look(json.loads(json.dumps(pack_look(look))))
    assert np.array_equal(again.pictures, look.pictures) and again.moments == look.moments
    assert np.array_equal(look.pictures[0], np.load(runs[0].pictures)[round(look.moments[0] * runs[0].fps)])
    assert again.bank == look.bank and len(look.bank.cuts) == 3
    slots = [sum(each.values()) for each in look.bank.slots]
    assert slots[-1] > 0 and len(look.bank.ends) == len(slots)
    assert open_clip(tmp_path / "video.mp4").num_pictures == len(np.load(runs[0].pictures))


@pytest.mark.parametrize(("alone", "room"), [(False, [True, True, False]), (True, [True, False, False])])
def test_generating_waits_for_judges_that_lag_behind_and_a_timed_run_for_all(tmp_path, alone, room):
    made = Batches(tmp_path, 1, 1, alone=alone)
    try:
        for pending, free in enumerate(room):
            made._pending = dict.fromkeys(range(pending))
            assert made.has_room() == free
    finally:
        made.close()


# What goes wrong


FOUR = {"backbone": "untrained", "prompts": 2, "seeds": 2, "seconds": 1.5}


def run_batches(tmp_path, jobs, rows=4, **how):
    notices = []
    store = ResultStore(tmp_path)
    made = Batches(tmp_path / "shown", rows, 1, notice=notices.append)
    scratch = made._scratch.name
    progress = run_jobs(jobs, store, made, rules=Rules(backoff_s=0), **how)
    assert not os.path.exists(scratch)  # noqa: PTH110
    return store, progress, notices


@pytest.mark.parametrize("fits", [2, 0])
def test_rows_that_memory_does_not_hold_are_generated_by_halves(tmp_path, monkeypatch, fits):
    sizes = []

    def narrow(some, *rest):
        sizes.append(len(some))
        if len(some) > fits:
            raise torch.OutOfMemoryError("no room")
        return generate_batch(some, *rest)

    monkeypatch.setattr(batches, "generate_batch", narrow)
    jobs = jobs_of("bank", **FOUR)
    store, progress, notices = run_batches(tmp_path, jobs)
    if fits:
        assert sizes == [4, 2, 2] and progress.done == 4 and all(map(store.has, jobs))
        assert notices[-1] == "4 rows are too many for the memory: again by 2"
    else:
        assert sizes == [4, 2, 1, 1, 1, 1] and progress.done == 0
        assert all("OutOfMemoryError: no room" in error for error in progress.errors.values())


def test_a_memory_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def fails(some, backbone, folder, *judges):
        if some[0].data["config"]["memory"]["name"] == "sink":
            (folder / f"{some[0].key}.npy").touch()
            raise RuntimeError("broken")
        return generate_batch(some, backbone, folder, *judges)

    monkeypatch.setattr(batches, "generate_batch", fails)
    jobs = jobs_of("retention", backbone="untrained", seconds=1.5)
    store, progress, _ = run_batches(tmp_path, jobs)
    assert progress.done == 2 and progress.retries == 0
    assert {name.partition(" of")[0] for name in progress.errors} == {"sink", "sink, lambda 5"}
    assert all("RuntimeError: broken" in error for error in progress.errors.values())
    monkeypatch.undo()
    _, progress, _ = run_batches(tmp_path, jobs)  # asked again, only what is missing is generated
    assert progress.done == 4 and len(store.file.read_text().splitlines()) == 4


def test_a_judge_that_fails_costs_its_run_alone(tmp_path, monkeypatch):
    def tampered(some, *rest):
        runs = generate_batch(some, *rest)
        if len(runs) > 1:
            runs[1].pictures.write_bytes(b"damaged")
        return runs

    monkeypatch.setattr(batches, "generate_batch", tampered)
    jobs = jobs_of("bank", **FOUR)[:3]
    store, progress, _ = run_batches(tmp_path, jobs, rows=3)
    # It is generated again by itself, and then nobody tampers with it.
    assert (progress.done, progress.retries) == (3, 1) and all(map(store.has, jobs))


def test_large_pictures_make_small_batches(tmp_path, monkeypatch):
    sizes = []

    def note(some, *rest):
        sizes.append(len(some))
        return generate_batch(some, *rest)

    monkeypatch.setattr(batches, "generate_batch", note)
    monkeypatch.setattr(batches, "SHARE_OF_DISK", 1 << 60)
    run_batches(tmp_path, jobs_of("bank", **FOUR)[:2])
    assert sizes == [1, 1]
