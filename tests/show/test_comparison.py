"""Comparisons as folders: what they contain, stopped and resumed, and what the page says of them."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recap.config import RunConfig
from recap.contracts import Curve
from recap.errors import RecapError
from recap.eval.judges.probe import Probe, save_probe
from recap.io.report import SILENT, Reporter
from recap.io.trace import bank_before, has_bank, read_trace
from recap.io.video import open_clip
from recap.run import resume
from recap.show.comparison import ComparisonSummary, compare
from recap.show.run_page import ColourJudge, contrast, histogram_cosine

SHOTS = [{"prompt": "a red boat </script>", "seconds": 2}, {"prompt": "a house", "seconds": 2}]
MEMORIES = ("none", "sink", "recap")
BLOCKS, PICTURES = 5, 57


def config(**changes) -> RunConfig:
    return RunConfig.from_dict({"shots": SHOTS, "backbone": "untrained", "flow": "classical", **changes})


class Stop(Exception):
    pass


def quiet(_: str) -> None:
    pass


def stop_at(block):
    def progress(done, total, rate):
        assert total == BLOCKS * len(MEMORIES)
        if done == block and rate:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> ComparisonSummary:
    return compare(config(), MEMORIES, tmp_path_factory.mktemp("whole") / "out", reporter=SILENT)


def page_data(summary):
    text = summary.page.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data = json.loads(found[1])
    (_, _, data["judged"]), (_, _, data["measured"]) = data["cards"]
    return data


def subjects_of(data):
    """The curves of the judge, by subject."""
    return {plot["title"]: plot["values"] for plot in data["judged"]}


def without_pixels_and_times(data):
    del data["cards"], data["judged"]
    data["measured"] = [plot for plot in data["measured"] if plot["steps"]]
    for method in data["methods"]:
        del method["block_s"]
        if method["bank"] is not None:
            del method["bank"]["sprite"]
    return data


def test_the_folder_holds_runs_a_video_and_a_page(whole):
    assert list(whole.runs) == list(MEMORIES)
    for name, run in whole.runs.items():
        assert json.loads((run / "run.json").read_text())["config"]["memory"]["name"] == name
        assert open_clip(run / "video.mp4").num_pictures == PICTURES
    sheet = open_clip(whole.out / "side-by-side.mp4")
    assert sheet.num_pictures == PICTURES
    assert (sheet.width, sheet.height) == (3 * 2 * 96 + 2 * 8, 2 * 64 + 32)


def test_a_batch_has_a_page_and_a_video_per_row(tmp_path):
    shown = []
    short = config(shots=[{"prompt": "a boat", "seconds": 1}], seeds=[3, 4])
    made = compare(
        short,
        ["none", "sink"],
        tmp_path / "out",
        reporter=SILENT,
        showing=lambda done, total, rate: shown.append((done, total)),
    )
    names = {path.name for path in made.out.iterdir() if path.is_file()}
    assert names == {"comparison.json", "index.html", "row-1.html", "side-by-side.mp4", "side-by-side-1.mp4"}
    for row, page in enumerate((made.page, made.out / "row-1.html")):
        assert f"seed {3 + row}" in page.read_text() and f"row {row} of 2" in page.read_text()
    first, second = (load_file(run / "latents.safetensors")["latents"] for run in made.runs.values())
    assert first.shape[0] == 2 and not torch.equal(first[0], first[1]) and first.shape == second.shape
    assert shown[-1] == (54, 54)  # per row 9 pictures side by side, and 9 of each memory judged


def test_every_memory_begins_with_the_same_picture(whole):
    """The first block sees no memory yet, so the same seed must generate the same."""
    first = [load_file(run / "latents.safetensors")["latents"][:, :3] for run in whole.runs.values()]
    assert all((one == first[0]).all() for one in first)


@pytest.mark.parametrize("block", [3, 5, 8, 14])  # inside the first run, at its end, inside later ones
def test_a_stopped_comparison_is_resumed(tmp_path, whole, block):
    with pytest.raises(Stop):
        compare(config(), MEMORIES, tmp_path / "out", reporter=Reporter(quiet, stop_at(block)))
    assert not (tmp_path / "out" / "index.html").exists()
    again = compare(config(), MEMORIES, tmp_path / "out", reporter=SILENT)
    for name in MEMORIES:
        for file in ("latents.safetensors", "trace.jsonl"):
            assert (again.runs[name] / file).read_bytes() == (whole.runs[name] / file).read_bytes()
    # Without what is measured in the videos: about 1 encoding in 500 of the same pictures differs in its bytes.
    assert without_pixels_and_times(page_data(again)) == without_pixels_and_times(page_data(whole))


def test_finished_runs_are_kept_and_memories_can_be_added(tmp_path):
    first = compare(config(), ["none"], tmp_path / "out", reporter=SILENT)
    kept = (first.runs["none"] / "timing.jsonl").read_bytes()
    (tmp_path / "out" / "sink").mkdir()  # killed before it was a run
    (tmp_path / "out" / "sink" / ".lock").touch()
    both = compare(config(), ["none", "sink"], tmp_path / "out", reporter=SILENT)
    assert (both.runs["none"] / "timing.jsonl").read_bytes() == kept
    assert [method["name"] for method in page_data(both)["methods"]] == ["none", "sink"]


@pytest.mark.parametrize("file", ["video.mp4", "trace.jsonl", "latents.safetensors"])
def test_a_finished_run_whose_files_were_changed_is_refused(tmp_path, whole, file):
    """Its summary alone proves nothing, here as in a run that is resumed."""
    out = shutil.copytree(whole.out, tmp_path / "out")
    path = out / "none" / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(RecapError, match=rf"{file}.*not what the finished run wrote; put it back"):
        compare(config(), MEMORIES, out, reporter=SILENT)
    if file == "video.mp4":
        path.unlink()
        with pytest.raises(RecapError, match=f"{file}.*is missing"):
            compare(config(), MEMORIES, out, reporter=SILENT)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seeds": [7]}, "seeds"),
        ({"shots": SHOTS[:1]}, "shots"),
        ({"admission": {"name": "flow", "percentile": 80.0}}, "admission"),
    ],
)
def test_runs_of_other_settings_are_refused_and_left_alone(whole, change, word):
    before = {path: path.stat().st_mtime_ns for path in whole.out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rf"other settings \({word}\)"):
        compare(config(**change), MEMORIES, whole.out, reporter=SILENT)
    with pytest.raises(ValueError, match=r"other settings \(memory\)"):
        compare(config(), [{"name": "sink", "reinforcement": 3}], whole.out, reporter=SILENT)
    assert {path: path.stat().st_mtime_ns for path in whole.out.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_refused(tmp_path, whole):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no comparison"):
        compare(config(), ["none"], tmp_path, reporter=SILENT)
    shutil.copytree(whole.runs["none"], tmp_path / "run")
    with pytest.raises(ValueError, match="no comparison"):
        compare(config(), ["none"], tmp_path / "run", reporter=SILENT)
    assert resume(tmp_path / "run", reporter=SILENT).num_blocks == BLOCKS


def test_equal_names_are_distinguished_by_their_settings(tmp_path):
    twice = [{"name": "sink"}, {"name": "sink", "reinforcement": 5}]
    summary = compare(config(shots=[{"prompt": "a", "seconds": 1}]), twice, tmp_path / "out", reporter=SILENT)
    assert list(summary.runs) == [
        "sink-sink_frames=1-reinforcement=1.0",
        "sink-sink_frames=1-reinforcement=5.0",
    ]
    with pytest.raises(ValueError, match="twice"):
        compare(config(), ["sink", {"name": "sink"}], tmp_path / "other", reporter=SILENT)
    with pytest.raises(ValueError, match="at least 1"):
        compare(config(), [], tmp_path / "other", reporter=SILENT)
    assert not (tmp_path / "other").exists()


def test_the_replayed_bank_is_the_one_the_run_ended_with(whole):
    state = load_file(whole.runs["recap"] / "state.safetensors")
    count = int(state["policy.bank.count"])
    source, score = (state[f"policy.bank.{part}"][0, :count].tolist() for part in ("source", "score"))
    trace = read_trace(whole.runs["recap"] / "trace.jsonl")
    assert bank_before(trace, len(trace)) == {
        tuple(place): value for place, value in zip(source, score, strict=True)
    }
    assert has_bank(trace) and not has_bank(read_trace(whole.runs["sink"] / "trace.jsonl"))
    # Something must have left it again, or the replay was not put to the test.
    assert any(line.evicted[0] for line in trace if line.evicted)


def test_the_page_shows_that_bank(whole):
    none, _, recap = page_data(whole)["methods"]
    trace = read_trace(whole.runs["recap"] / "trace.jsonl")
    bank = bank_before(trace, len(trace))
    assert none["bank"] is None and bank
    new = sorted(place for place, score in bank.items() if score > 0)
    assert [tuple(patch[1:4]) for patch in recap["bank"]["patches"]] == new
    assert [patch[0] for patch in recap["bank"]["patches"]] == [frame * 4 / 16 for frame, _, _ in new]


def test_curves_have_a_value_per_sample_and_per_block(whole):
    data = page_data(whole)
    assert data["duration"] == pytest.approx(PICTURES / 16, abs=1e-3) and len(data["blocks"]) == BLOCKS
    assert data["blocks"][:3] == [0, 0.5625, 1.3125]
    assert [scene[1:] for scene in data["scenes"]] == [["a red boat </script>", False], ["a house", True]]
    (judged,), (contrasts, fired) = data["judged"], data["measured"]
    assert judged["starts_s"] == contrasts["starts_s"] == [n / 2 for n in range(8)]
    assert fired["starts_s"] == data["blocks"] and fired["title"] == "Something new"
    for method, colours, levels in zip(data["methods"], judged["values"], contrasts["values"], strict=True):
        assert len(colours) == len(levels) == 8
        assert colours[0] == 1 and 0 < min(colours) < 1
        assert len(method["shares"]) == BLOCKS
        assert all(sum(share.values()) == pytest.approx(1, abs=1e-3) for share in method["shares"])
    assert [values and len(values) for values in fired["values"]] == [None, None, BLOCKS]


def test_the_page_stands_alone(whole):
    text = whole.page.read_text()
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(h", re.sub(r"base64,[^\"]*", "", text).replace("</", "")
    )
    sources = re.findall(r'\b(?:src|href)="([^"]*)', text)
    assert len(sources) == 3 and all(source.startswith("data:video/mp4;base64,") for source in sources)
    assert len(text) < 25_000_000 and "<h1>a red boat &lt;/script&gt;</h1>" in text
    assert text.count("</script>") == 2


def test_the_page_says_what_a_bank_is_made_of(tmp_path, whole):
    """Of the patches that were new: how many lie at the sides; how many show a subject, where a judge can tell."""
    shutil.copytree(whole.out, tmp_path / "out")

    class LeftHalf(ColourJudge):
        def subjects(self, picture):
            seen = torch.zeros(picture.shape[0] // 16, picture.shape[1] // 16, dtype=torch.bool)
            seen[:, : seen.shape[1] // 2] = True
            return seen

    summary = compare(config(), ["recap"], tmp_path / "out", reporter=SILENT, judge=LeftHalf())
    trace = [json.loads(line) for line in (summary.runs["recap"] / "trace.jsonl").read_text().splitlines()]
    bank = {}
    for line in trace:
        for entry in line["evicted"][0]:
            bank.pop(tuple(entry[:3]))
        bank |= {tuple(entry[:3]): entry[3] for entry in line["admitted"][0]}
    columns = [column for (_, _, column), score in bank.items() if score > 0]
    edge = sum(column in (0, 5) for column in columns) / len(columns)
    left = sum(column < 3 for column in columns) / len(columns)
    assert trace[-1]["bank_edge_share"] == [pytest.approx(edge, abs=1e-6)]
    words = (
        f"{len(columns)} patches were new; {edge:.0%} of them lie in the first or last column (33% by area)"
    )
    assert words + f", {left:.0%} show a subject." in summary.page.read_text()
    assert words + "." in compare(config(), ["recap"], tmp_path / "out", reporter=SILENT).page.read_text()


def test_another_judge_can_be_handed_in(tmp_path, whole):
    shutil.copytree(whole.out, tmp_path / "out")
    received = []

    class Half:
        name, about = "Half", "Always one half, or nothing."

        def curves(self, samples):
            received.extend((sample.second, sample.prompt, tuple(sample.picture.shape)) for sample in samples)
            return [Curve("one", [0.5] * len(received)), Curve("<two>", [None] * len(received))]

        def subjects(self, picture):
            return None

    summary = compare(config(), ["none"], tmp_path / "out", reporter=SILENT, judge=Half())
    boat, house = (shot["prompt"] for shot in SHOTS)
    # The second shot begins with the fourth block, at 2.0625 s.
    assert received == [(n / 2, boat if n <= 4 else house, (64, 96, 3)) for n in range(8)]
    data = page_data(summary)
    assert subjects_of(data) == {"one": [[0.5] * 8], "<two>": [[None] * 8]}
    assert "Always one half, or nothing." in summary.page.read_text()


@pytest.fixture
def blank_probe(tmp_path, monkeypatch):
    """Random weights, with which the probe finds nobody."""
    save_probe(Probe(), tmp_path / "probe.safetensors")
    monkeypatch.setattr("recap.eval.judges.probe.SHIPPED", tmp_path / "probe.safetensors")


@pytest.mark.slow
def test_videos_of_the_embedded_backbone_are_judged_by_the_probe(tmp_path, blank_probe):
    shots = [
        {"prompt": "a fox on a beach by day", "seconds": 1},
        {"prompt": "a bus and a fox on a beach by day", "seconds": 1, "cut": False},
    ]
    generated, shown = [], []
    summary = compare(
        config(shots=shots, backbone="embedded"),
        ["none"],
        tmp_path / "out",
        reporter=Reporter(quiet, lambda done, total, rate: generated.append((done, total))),
        showing=lambda done, total, rate: shown.append((done, total)),
    )
    data = page_data(summary)
    # The bus is asked for from the second block on, at 0.5625 s.
    assert subjects_of(data) == {"the fox": [[0, 0, 0, 0, 0]], "the bus": [[None, None, 0, 0, 0]]}
    assert "not found" in summary.page.read_text()
    assert generated[-1] == (3, 3) and shown[-1] == (66, 66)  # 33 pictures side by side, 33 judged


def test_a_missing_probe_is_reported_before_anything_is_generated(tmp_path, monkeypatch):
    monkeypatch.setattr("recap.eval.judges.probe.SHIPPED", tmp_path / "none.safetensors")
    shots = [{"prompt": "a fox on a beach by day", "seconds": 1}]
    with pytest.raises(ValueError, match=r"none\.safetensors.*no such file"):
        compare(config(shots=shots, backbone="embedded"), ["none"], tmp_path / "out", reporter=SILENT)
    assert not (tmp_path / "out").exists()


def test_measures_on_pictures_whose_answer_is_known():
    black, white = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)
    half = np.concatenate([black[:2], white[2:]])
    assert histogram_cosine(black, black) == 1 and histogram_cosine(black, white) == 0
    assert histogram_cosine(black, half) == pytest.approx(0.5**0.5)
    assert histogram_cosine(half, half[::-1]) == pytest.approx(1)  # blind to places
    assert contrast(white) == pytest.approx(0) and contrast(half) == pytest.approx(0.5)


def flow_of(record):
    about = json.loads(record.read_text())
    return about.get("config", about)["flow"]


@pytest.mark.slow
def test_the_flow_is_found_out_once_for_all_runs(tmp_path):
    lines = []
    two = [{"name": "recap"}, {"name": "recap", "reinforcement": 3}]
    short = config(flow="auto", shots=SHOTS[:1])
    made = compare(short, ["none", *two], tmp_path / "out", reporter=Reporter(lines.append))
    assert len(lines) == 1 and "flow: classical" in lines[0]
    records = [tmp_path / "out" / "comparison.json", *(run / "run.json" for run in made.runs.values())]
    assert {flow_of(record) for record in records} == {"classical"}
    lines.clear()
    compare(short, ["none", "sink"], tmp_path / "without", reporter=Reporter(lines.append))
    assert lines == [] and flow_of(tmp_path / "without" / "comparison.json") == "auto"
    for _ in range(2):  # with a memory that needs flow added
        compare(short, ["none", "recap"], tmp_path / "without", reporter=SILENT)
        assert flow_of(tmp_path / "without" / "comparison.json") == "classical"


@pytest.mark.slow
def test_a_stopped_comparison_is_resumed_with_its_flow_when_weights_have_come(
    tmp_path, monkeypatch, random_raft
):
    """As `make demo` does, begun without a network and asked for again with one."""
    with pytest.raises(Stop):
        compare(config(flow="auto"), MEMORIES, tmp_path / "out", reporter=Reporter(quiet, stop_at(12)))
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    done = compare(config(flow="auto"), MEMORIES, tmp_path / "out", reporter=SILENT)
    assert {flow_of(run / "run.json") for run in done.runs.values()} == {"classical"}
    with pytest.raises(ValueError, match=r"other settings \(flow\)"):
        compare(config(flow="raft-small"), MEMORIES, tmp_path / "out", reporter=SILENT)


@pytest.mark.slow
def test_what_a_prompt_loses_is_reported_once_for_all_runs(tmp_path, capsys):
    lines = []
    shots = [{"prompt": text, "seconds": 0.5} for text in ("a cute lion on a beach", "a lion on a beach")]
    summary = compare(
        config(shots=shots, backbone="embedded"),
        ["none", "sink"],
        tmp_path / "out",
        reporter=Reporter(lines.append),
    )
    assert len(lines) == 2 and "'cute'" in lines[0] and "a cat is shown instead" in lines[1]
    assert capsys.readouterr().out == "", "all of it goes to the notice"
    assert list(subjects_of(page_data(summary))) == ["the cat"]
