"""Measures and pages of runs on a tiny Helios: seconds of cuts and sources, bank patches from the right picture.

A chunk is 9 frames and 33 pictures, so a frame's pictures are not four times its index, nor that and one more.
"""

from __future__ import annotations

import dataclasses
import json
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from helios_fakes import FRAMES, PROMPT, TinyHelios

import recap.show.inspection
import recap.show.run_page
from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.helios.spec import ROWS as PUBLIC
from recap.config import RunConfig
from recap.eval.metrics import all_measures
from recap.eval.metrics.reappearance import starts_from_trace
from recap.eval.sampling import InMemoryClip
from recap.flow import ClassicalFlow
from recap.io.report import SILENT
from recap.io.trace import BlockTrace, bank_before, read_trace
from recap.io.video import open_clip
from recap.memory.sink import NoMemoryConfig
from recap.plan import make_plan
from recap.rollout import Resume, rollout
from recap.show.comparison import compare
from recap.show.inspection import inspect_clip
from recap.tables.ask import Ask
from recap.tables.generating import generate_and_score, generate_batch, score_generated
from recap.tables.page import look_at, unpack_look
from recap.tables.recipes import find_recipe
from recap.tables.report import write_report
from recap.tables.reproduce import reproduce
from recap.tables.runner import Progress
from recap.tables.runs import TableRuns
from recap.tables.scripts import reappearance_scripts

NAME, FPS, CHUNK = "helios_fakes:TinyHelios", 24, 33
# Pages of the other models are tested in `make test`.
pytestmark = pytest.mark.slow

CHUNKS = 8
ASK = Ask(
    device="cpu",
    embedder="hsv",
    backbone=NAME,
    prompts=1,
    seeds=1,
    seconds=CHUNKS * CHUNK / FPS,
    flow="classical",
)
CUTS = [CHUNK / FPS, 3 * CHUNK / FPS, 6 * CHUNK / FPS]  # segments of 1, 2, 3 and 2 chunks
LASTS = CHUNKS * CHUNK / FPS
SETTLING = LASTS / 24  # the first second of 24, scaled to a shorter video
SPEC = TinyHelios().build(device="cpu", dtype=torch.float32, prompts=[], notice=print).spec


def quiet(_: str) -> None:
    pass


def picture_range(frame: int) -> range:
    """By hand: a chunk's first frame is one picture, every other is four."""
    chunk, place = divmod(frame, FRAMES)
    start = chunk * CHUNK + (0 if place == 0 else 1 + (place - 1) * 4)
    return range(start, start + (1 if place == 0 else 4))


@pytest.mark.parametrize("name", PUBLIC)
def test_frames_and_pictures_are_counted_in_one_place(name):
    spec = PUBLIC[name].backbone_spec()
    assert spec.first_pictures(108, 2) == (396, 397)
    for frame in range(60):
        pictures = picture_range(frame)
        assert (
            spec.first_pictures(frame, 1) == (pictures[0],)
            and spec.num_pictures(frame + 1) == pictures[-1] + 1
        )
        assert spec.num_frames(spec.num_pictures(frame)) == frame


def test_frames_of_one_stream_are_counted_there_too(spec):
    assert spec.first_pictures(0, 4) == (0, 1, 5, 9)
    assert [spec.num_frames(pictures) for pictures in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_segments_of_the_whole_protocol_begin_where_they_are_cut():
    """24 s in 17 chunks; the last cut, to segment D, is at 16.5 s."""
    helios = TinyHelios().build(device="cpu", dtype=torch.float32, prompts=[], notice=quiet)
    spec = helios.spec
    plan = make_plan([reappearance_scripts(NAME, 24.0)[0].shots], spec)
    latents = torch.zeros(1, plan.blocks[-1].end_frame, spec.latent_channels, *spec.latent_size)
    policy = NoMemoryConfig().build(spec, lambda: None)
    blocks = list(rollout(helios, policy, plan, seeds=[0], resume=Resume(opening_latents=latents)))
    shown = np.cumsum([0, *(made.pixels.shape[1] for made in blocks)])
    assert shown[-1] == 17 * CHUNK
    cuts = [shown[made.block.index] / FPS for made in blocks if made.block.clears_prior]
    assert starts_from_trace([BlockTrace.of(made) for made in blocks], FPS) == [0.0, *cuts]
    assert cuts == [2.75, 9.625, 16.5]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two rows of reappearance, generated here instead of in other processes, which would have to load diffusers."""

    def generate_here(jobs, store, executor, **_):
        executor.close()
        for job in jobs:
            store.add(job.key, generate_and_score(job, store.folder / "shown" / job.key))
        return Progress(len(jobs), len(jobs))

    folder, notices = tmp_path_factory.mktemp("results"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recap.tables.reproduce.run_jobs", generate_here)
        patch.setattr("recap.tables.reproduce.find_recipe", lambda _: two_rows())
        reproduce(["reappearance"], ASK, folder, notice=notices.append)
    assert not any("no video" in line for line in notices), notices
    return folder


def two_rows(**changes):
    whole = find_recipe("reappearance")
    rows = tuple(row for row in whole.rows if row.name in ("none", "recap"))
    return dataclasses.replace(whole, rows=rows, **changes)


def jobs_of(row, recipe, ask=ASK):
    plan = TableRuns([recipe], ask, {"reappearance": {}})
    return [plan.jobs[run.job.key] for run in plan.tables["reappearance"] if run.row.name == row]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The run of the row with a bank, and the job it is of, with all measures."""
    (job,) = jobs_of("recap", two_rows(measures=tuple(all_measures())))
    helios = TinyHelios().build(device="cpu", dtype=torch.float32, prompts=[], notice=quiet)
    return generate_batch([job], helios, tmp_path_factory.mktemp("ours"))[0], job


def scored(run, job):
    return score_generated(dataclasses.replace(job, options={"generated": run}), run.pictures.parent)


def scores_of(results, row):
    lines = (results / "reappearance" / "results.jsonl").read_text().splitlines()
    return next(line["scores"] for line in map(json.loads, lines) if line["row"] == row)


@pytest.mark.parametrize("row", ["none", "recap"])
def test_segments_are_compared_in_the_seconds_they_were_generated_in(results, row):
    """B is the second and third chunk, D the last two, whatever the memory."""
    details = scores_of(results, row)["reappearance_frame"]["details"]
    expected = [[CUTS[0] + SETTLING, CUTS[1]], [CUTS[2] + SETTLING, LASTS]]
    assert np.allclose(details["windows_s"], expected)


def test_slots_from_the_subjects_segment_are_those_of_its_frames(results, ours):
    found = scores_of(results, "recap")["bank_slots_from_B"]
    kept = bank_before(ours[0].trace, 6)
    assert found["value"] == sum(FRAMES <= frame < 3 * FRAMES for frame, _, _ in kept)


def test_the_page_and_the_report_show_cuts_where_they_are(results):
    # Figures are pictures within the page.
    page = unquote((results / "reappearance" / "index.html").read_text())
    report = unquote(write_report([results]).read_text())
    for cut in CUTS:
        # The chart's left edge and width.
        x = f"{60 + cut / LASTS * 670:.2f}".rstrip("0").rstrip(".")
        for text in (page, report):
            assert f'<line x1="{x}" y1="44" x2="{x}"' in text
    assert page.count("bank of recap") == report.count("bank of recap") == 1
    # Three cuts, and the line of ours in its figure: the camera needs no judge of this world.
    assert page.count("stroke-dasharray") == 3 + 1


def test_the_bank_of_a_page_is_shown_in_the_seconds_of_its_pictures(ours):
    run, job = ours
    clip = InMemoryClip(np.load(run.pictures), run.fps)
    shots_s = [shot["seconds"] for shot in job.data["config"]["shots"]]
    history = look_at(clip, run.trace, shots_s).bank
    assert history.cuts == CUTS and list(history.ends) == [n * CHUNK / FPS for n in range(1, CHUNKS + 1)]
    frames = {frame for frame, _, _ in bank_before(run.trace, len(run.trace))}
    assert set(history.slots[-1]) == {picture_range(frame)[0] / FPS for frame in frames}


def test_every_measure_has_something_to_say_of_a_helios_run(ours):
    result = scored(*ours)
    scores = {name: score for measure in all_measures() for name, score in result[measure].items()}
    for name in ("reappearance_frame", "retention_frame_end", "dynamic_degree", "dynamic_degree_5s", "camera_flow",
                 "temporal_flickering", "subject_consistency", "background_consistency", "bank_mean_age",
                 "bank_cutoff", "block_s"):  # fmt: skip
        assert scores[name]["value"] is not None, name
    assert "identity_frame" in scores  # None: a video this short has too few early sightings
    assert scores["bank_overlap"]["value"] == scores["bank_overlap_lowest"]["value"] == 1.0
    assert 0 < scores["bank_mean_age"]["value"] < 1
    shares = {name: s["value"] for name, s in scores.items() if name.startswith("attention_")}
    assert set(shares) == {f"attention_{role}" for role in ("sink", "bank", "prior", "current")}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


def test_rows_of_a_batch_are_scored_as_runs_of_their_own(tmp_path):
    jobs = jobs_of("recap", two_rows(), dataclasses.replace(ASK, prompts=2))
    helios = TinyHelios().build(device="cpu", dtype=torch.float32, prompts=[], notice=quiet)
    runs = generate_batch(jobs, helios, tmp_path)
    results = [scored(run, job) for run, job in zip(runs, jobs, strict=True)]
    for run, result in zip(runs, results, strict=True):
        details = result["reappearance"]["reappearance_frame"]["details"]
        assert details["windows_s"][0][1] == pytest.approx(CUTS[1])
        for line in run.trace:
            for stage in line.stage_shares:
                assert all(len(share) == 1 for share in stage.values())
    own = [run.trace[1].stage_shares[-1]["bank"] for run in runs]
    assert own[0] != own[1]
    assert unpack_look(results[0]["look"]).bank.cuts == CUTS


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison over a cut, and what its page was made of."""
    config = RunConfig.from_dict(
        {
            "shots": [{"prompt": PROMPT, "seconds": 2.75}, {"prompt": "a house", "seconds": 2.75}],
            "backbone": NAME,
            "flow": "classical",
        }
    )
    shown, build = [], recap.show.run_page.build_video_page
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            recap.show.run_page, "build_video_page", lambda made: (shown.append(made), build(made))[1]
        )
        summary = compare(
            config, ["none", "sink", "recap"], tmp_path_factory.mktemp("c") / "out", reporter=SILENT
        )
    return summary, shown[0]


def test_bank_patches_are_cut_from_the_last_picture_of_their_frame(compared):
    summary, page = compared
    pictures = list(open_clip(summary.runs["recap"] / "video.mp4").pictures())
    assert len(pictures) == 4 * CHUNK
    trace = read_trace(summary.runs["recap"] / "trace.jsonl")
    kept = bank_before(trace, len(trace))
    new = sorted(place for place, score in kept.items() if score > 0)
    bank, side = page.methods[2].bank, SPEC.token_pixels
    assert list(zip(bank.frames, bank.rows, bank.columns, strict=True)) == new
    assert max(frame for frame, _, _ in new) > FRAMES  # or no second chunk was put to the test
    for (frame, row, column), patch, second in zip(new, bank.pixels, bank.seconds, strict=True):
        last = picture_range(frame)[-1]
        top, left = row * side, column * side
        assert second == last / FPS
        assert np.array_equal(patch, pictures[last][top : top + side, left : left + side])


def test_scenes_and_blocks_of_the_page_begin_with_their_chunks(compared):
    _, page = compared
    assert list(page.block_starts_s) == [n * CHUNK / FPS for n in range(4)]
    assert page.duration_s == 4 * CHUNK / FPS
    assert [(scene.start_s, scene.cut) for scene in page.scenes] == [(0.0, False), (2 * CHUNK / FPS, True)]
    assert [method.bank is None for method in page.methods] == [True, True, False]


def test_patches_of_an_inspected_video_are_what_it_shows_then(compared, tmp_path, monkeypatch):
    """A file does not tell its model, so it is cut as any clip is; seconds and pixels are still the picture's own."""
    video = compared[0].runs["recap"] / "video.mp4"
    stories, build = [], recap.show.inspection.build_video_page
    monkeypatch.setattr(
        recap.show.inspection, "build_video_page", lambda story: (stories.append(story), build(story))[1]
    )
    page = inspect_clip(
        video, tmp_path / "out", flow=ClassicalFlow(), config=FlowNoveltyConfig(), reporter=SILENT
    )
    found = json.loads((page.parent / "inspect.json").read_text())["summary"]
    assert found["num_pictures"] == 4 * CHUNK and found["fps"] == FPS and found["grid"] == list(SPEC.grid)
    pictures, side = list(open_clip(video).pictures()), SPEC.token_pixels
    patches = stories[0].methods[0].bank
    assert len(patches) == found["bank_new"] > 0
    for index, second in enumerate(patches.seconds):
        top, left = patches.rows[index] * side, patches.columns[index] * side
        shown = pictures[round(second * FPS)][top : top + side, left : left + side]
        assert np.array_equal(patches.pixels[index], shown)
