"""The list of docs/evaluation.md: every table and figure of the paper, by a command that plans the right runs."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from recap.cli import main
from recap.tables.baselines import on_backbone
from recap.tables.recipes import find_recipe
from recap.tables.reproduce import How, reproduce
from recap.tables.runs import TableRuns, plan_runs
from recap_vbench.suites import SUITES
from recap_vbench.whole import make_tables

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"
# Labels of the paper's source.
TABLES = {
    "tab:vbench_long_main", "tab:vbench_long_plugins", "tab:vbench_long_ablation", "tab:bank_sink_sweeps",
    "tab:human_study", "tab:impl", "tab:identity_long", "tab:identity", "tab:reappear_ctrl", "tab:picker",
    "tab:vbench_long_speed", "tab:motion_decomp",
}  # fmt: skip
FIGURES = {"fig:teaser", "fig:motivation", "fig:method", "fig:lambda_sweep", "fig:qual", "fig:length"}
ARMS = ["none", "sink", "sink, lambda 5", "recap"]
LAMBDAS = [f"lambda {x}" for x in (1, 3, 5, 8, 10, 12)]
SUITE, OWN = (128, 5), (20, 5)
SF, IF = "self-forcing", "infinite-forcing"
# What each line plans: tables, backbone, (prompts, seeds), lengths in s, and the rows.
PLANS = {
    "`tab:vbench_long_main`, Self-Forcing": (["main"], SF, SUITE, {60}, ["none", "sink", "recap"]),
    "`tab:vbench_long_main`, Infinite-Forcing": (["main"], IF, SUITE, {60}, ["as released", "recap"]),
    "`tab:vbench_long_main`, LongLive": (["main"], "longlive", SUITE, {60}, ["as released", "sink", "recap"]),
    "`tab:vbench_long_main`, Helios": (["main"], "helios-distilled", SUITE, {60}, ["none", "sink", "recap"]),
    "`tab:vbench_long_plugins`": (
        ["rivals"], SF, SUITE, {60}, ["none", "deep-forcing", "memrope", "rolling-sink", "relax-forcing", "recap"],
    ),
    "`tab:vbench_long_ablation`": (["components"], IF, SUITE, {60}, ["none", "sink", "bank", "recap"]),
    "`tab:bank_sink_sweeps`, `fig:lambda_sweep` (b)": (
        ["capacity", "lambda"], IF, SUITE, {60}, [*(f"{x} frames" for x in ("0.25", "0.5", 1, 2, 4, 8)), *LAMBDAS],
    ),
    "`fig:lambda_sweep` (a)": (["lambda"], IF, SUITE, {60}, LAMBDAS),
    "`tab:picker`": (
        ["admission"], IF, SUITE, {60},
        ["no bank", "no bank, lambda 5", "random", "recent", "diversity", "diversity of keys", "flow-texture", "keys",
         "recap"],
    ),
    "`fig:length`": (["length"], IF, SUITE, {60}, ["as released", "recap"]),
    "`tab:identity_long`": (["identity"], SF, OWN, {60}, ARMS),
    "`tab:identity`": (["retention", "retention-5min"], SF, OWN, {60, 300}, [*ARMS, *ARMS]),
    "`tab:reappear_ctrl`": (["reappearance"], SF, OWN, {24}, ARMS),
    'text, "Retention Behavior", 220 rollouts': (["bank"], SF, (20, 11), {60}, ["recap"]),
    "`tab:vbench_long_speed`": (
        ["time"], SF, (1, 1), {60, 120, 300}, [f"{name}, {m} min" for m in (1, 2, 5) for name in ("none", "recap")],
    ),
    "`tab:motion_decomp`": (["motion"], SF, (128, 1), {60}, ["none", "sink", "recap"]),
}  # fmt: skip
# Pictures a second of video, and generated in a second on one H200.
WAN, HELIOS = (16, 38.7), (24, 7.66)


def listed():
    """What the page lists: the paper's names -> command, videos, hours."""
    part = PAGE.read_text().split("## Every table and figure of the paper")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    return {name: (command.strip("`"), videos, hours) for name, command, _, videos, hours in lines}


LIST = listed()
WITH_SUITE = [name for name in PLANS if "--suite" in LIST[name][0]]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Return a function that gives a command and says what it asked for, without doing it."""
    lines = [f"a fox on beach {number}" for number in range(128)]
    (tmp_path / "vbench128.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)

    def ask(name):
        found = []

        class Stopped(Exception):
            pass

        def note(*words, **_):
            found.append(words)
            raise Stopped

        monkeypatch.setattr("recap.cli.reproduce.reproduce", note)
        monkeypatch.setattr("recap_vbench.command.make_tables", note)
        done = CliRunner().invoke(main.app, shlex.split(LIST[name][0])[1:])
        assert isinstance(done.exception, Stopped), (done.output, done.exception)
        return found[0]

    return ask


def test_every_table_and_figure_is_listed():
    named = set(re.findall(r"(?:tab|fig):\w+", " ".join(LIST)))
    assert named == TABLES | FIGURES
    assert set(PLANS) <= set(LIST)


@pytest.mark.parametrize("name", LIST)
def test_every_command_parses(name):
    program, *words = shlex.split(LIST[name][0])
    assert program == "recap"
    group = typer.main.get_command(main.app)
    while words[0] in getattr(group, "commands", ()):
        group = group.commands[words.pop(0)]
    group.make_context(group.name, words)


@pytest.mark.parametrize("name", PLANS)
def test_every_command_plans_the_right_runs(name, asked):
    tables, backbone, (prompts, seeds), lengths, rows = PLANS[name]
    given, hours = asked(name), float(LIST[name][2])
    per_second, speed = HELIOS if backbone.startswith("helios") else WAN
    if name in WITH_SUITE:
        asked, suite = given[0], SUITES["vbench128"]
        assert (asked.suite, list(asked.tables), asked.backbone) == ("vbench128", tables, backbone)
        assert (asked.flow, asked.device, asked.dtype) == ("raft-small", "cuda", "auto")
        # A config of a GPU can be made only where there is one.
        asked = replace(asked, device="cpu")
        assert (asked.num or suite.num_entries, asked.seeds or suite.seeds) == (prompts, seeds)
        assert {asked.seconds} == lengths
        assert [row.name for recipe in asked.recipes() for row in recipe.rows] == rows
        folders = {asked.folder(row, Path()) for recipe in asked.recipes() for row in recipe.rows}
        videos = prompts * seeds * len(folders)
        assert all(asked.template(row).backbone.name == backbone for r in asked.recipes() for row in r.rows)
        seconds = asked.seconds * videos
    else:
        names, ask = given[0], given[1]
        assert (names, ask.backbone, ask.prompts) == (tables, backbone, prompts)
        assert (ask.flow, ask.device, ask.dtype) == ("raft-small", "cuda", "bfloat16")
        recipes = [on_backbone(find_recipe(table), backbone) for table in names]
        assert [row.name for recipe in recipes for row in recipe.rows] == rows
        runs = TableRuns(recipes, ask, {recipe.name: {} for recipe in recipes})
        assert {ask.seeds or recipe.seeds for recipe in recipes} == {seeds}
        assert {round(job.size, 6) for job in runs.jobs.values()} == lengths
        videos, seconds = len(runs.jobs), sum(job.size for job in runs.jobs.values())
        assert all(
            len(own) == prompts * seeds * len(r.rows) for r in recipes for own in [runs.tables[r.name]]
        )
        needs = {measure for recipe in recipes for measure in recipe.measures}
        if needs & {"identity", "retention", "reappearance"}:
            assert (ask.embedder, ask.detector) == ("dinov2", "qwen2.5-vl")
        if needs & {"motion", "length", "dynamics", "subject_motion"}:
            assert ask.judge_flow == "raft-small"
    assert LIST[name][1] == str(videos)
    assert hours == pytest.approx(seconds * per_second / speed / 3600, rel=0.06)


def test_the_backbone_of_the_ablations_and_its_baseline_are_those_of_the_paper(asked):
    for name in (
        "`tab:vbench_long_ablation`",
        "`tab:picker`",
        "`tab:bank_sink_sweeps`, `fig:lambda_sweep` (b)",
    ):
        assert asked(name)[0].backbone == IF
    _, ask, *_ = asked("`fig:length`")
    (baseline,) = [
        run for run in plan_runs(on_backbone(find_recipe("length"), IF), replace(ask, prompts=1, seeds=1))
        if run.row.name == "as released"
    ]  # fmt: skip
    assert baseline.config.memory.name == "sink" and baseline.config.memory.settings.reinforcement == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANS if name not in WITH_SUITE])
def test_a_small_run_of_every_command(name, asked, tmp_path):
    tables, ask, *_ = asked(name)
    small = replace(
        ask, backbone="untrained", prompts=1, seeds=2 if "length" in tables else 1, seconds=6.0, device="cpu",
        dtype="float32", flow="classical", judge_flow="classical", embedder="hsv", detector="",
    )  # fmt: skip
    done = reproduce(tables, small, tmp_path, How(workers=None), notice=lambda _: None)
    assert not done.left and set(done.tables) == set(tables)
    assert all(page.is_file() for page in done.pages)
    if "length" in tables:
        text = (tmp_path / "length" / "table.csv").read_text()
        assert "subject_consistency_5s_seed_deviation" in text and "dynamic_degree_5s_seed_deviation" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in WITH_SUITE if PLANS[name][1] == IF or name == "`tab:vbench_long_plugins`"]
)
def test_a_small_run_of_every_command_with_a_suite(name, asked, environment, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("VBENCH_CACHE_DIR", raising=False)
    small = replace(
        asked(name)[0],
        backbone="untrained",
        num=1,
        seeds=1,
        seconds=2.0,
        device="cpu",
        dtype="auto",
        flow="classical",
    )
    pages = make_tables(small, environment, tmp_path / "out", lambda _: None)
    assert len(pages) == len(small.tables) and all(page.is_file() for page in pages)


@pytest.mark.slow
def test_a_small_run_of_the_commands_that_make_no_table(tmp_path, monkeypatch):
    """Videos side by side, what a bank would keep of a video, the defaults, and a study of such videos."""
    monkeypatch.chdir(tmp_path)

    def run(name, **changed):
        words = shlex.split(LIST[name][0])[1:]
        for option, value in changed.items():
            at = words.index(f"--{option}") if f"--{option}" in words else len(words)
            words[at : at + 2] = [f"--{option}", str(value)]
        done = CliRunner().invoke(main.app, words)
        assert done.exit_code == 0, (done.output, done.exception)

    small = {"backbone": "untrained", "seconds": 2, "device": "cpu", "dtype": "float32", "flow": "classical"}
    five = "none,deep-forcing,memrope,rolling-sink,recap"
    run("`fig:teaser`, `fig:qual`", **small, out="two")
    assert (tmp_path / "two" / "index.html").is_file()
    run("`fig:teaser`, `fig:qual`", **small, memories=five, out="runs/suv")
    run("`tab:human_study`", pairs=4)
    assert (tmp_path / "study" / "index.html").is_file() and (tmp_path / "study.key.json").is_file()
    run("`tab:impl`", flow="classical", out="run")
    settings = (tmp_path / "run" / "run.json").read_text()
    assert '"reinforcement": 5.0' in settings and '"capacity_frames": 1.0' in settings
    (tmp_path / "video.mp4").write_bytes((tmp_path / "run" / "video.mp4").read_bytes())
    run("`fig:motivation`, `fig:method` (b)", flow="classical", out="seen")
    assert (tmp_path / "seen" / "index.html").is_file()


def test_every_line_has_a_small_run():
    others = {
        "`tab:human_study`",
        "`fig:teaser`, `fig:qual`",
        "`fig:motivation`, `fig:method` (b)",
        "`tab:impl`",
    }
    assert set(LIST) == set(PLANS) | others
