"""Runs as folders: stopped, resumed, changed behind our back."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recap.backbones.wan.spec import EMBEDDED, UNTRAINED
from recap.config import RunConfig
from recap.flow import RAFT_SMALL, resolve_flow
from recap.io.cast import read_cast, write_cast
from recap.io.record import versions
from recap.io.report import SILENT, Reporter
from recap.io.trace import read_trace
from recap.run import RunRecord, generate, resume, settle_flow
from recap.show.sheet import write_png
from tests.io.test_cast import subject_of

SHOTS = [{"prompt": "a red boat", "seconds": 3}, {"prompt": "a house", "seconds": 3}]


def config(**changes) -> RunConfig:
    return RunConfig.from_dict({"shots": SHOTS, "backbone": "untrained", "flow": "classical", **changes})


class Stop(Exception):
    pass


def stop_after(blocks):
    def progress(done, total, rate):
        if done == blocks and rate:
            raise Stop

    return progress


def quiet(_: str) -> None:
    pass


def begun(folder, blocks, **changes):
    with pytest.raises(Stop):
        generate(config(**changes), folder, reporter=Reporter(quiet, stop_after(blocks)))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunRecord:
    return generate(config(), tmp_path_factory.mktemp("whole") / "run", reporter=SILENT)


def equal(one, other):
    names = ("latents.safetensors", "trace.jsonl")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_a_stopped_run_continues_from_its_last_state(tmp_path, whole, blocks):
    folder = begun(tmp_path / "run", blocks)
    times = (folder / "timing.jsonl").read_text().splitlines()
    record = resume(folder, reporter=SILENT)
    assert equal(folder, whole.folder)
    assert (folder / "timing.jsonl").read_text().splitlines()[:blocks] == times
    assert record.num_pictures == 93 and record.videos[0].is_file()


def test_states_every_third_block(tmp_path, whole):
    folder = begun(tmp_path / "run", 5, checkpoint_every=3)
    assert int(load_file(folder / "state.safetensors")["next_block"]) == 3
    times = (folder / "timing.jsonl").read_text().splitlines()
    assert len(times) == 5
    resume(folder, reporter=SILENT)
    again = (folder / "timing.jsonl").read_text().splitlines()
    assert again[:3] == times[:3] and again[3:5] != times[3:5] and len(again) == 8
    assert equal(folder, whole.folder)


def test_a_stop_before_the_first_state_starts_over(tmp_path, whole):
    folder = begun(tmp_path / "run", 2, checkpoint_every=5)
    assert not (folder / "state.safetensors").exists()
    resume(folder, reporter=SILENT)
    assert equal(folder, whole.folder)


def test_auto_is_written_down_as_what_it_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "nothing"))
    notices = []
    generate(config(flow="auto"), tmp_path / "run", reporter=Reporter(notices.append))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["flow"] == "classical"
    assert len(notices) == 1 and "recap weights raft-small" in notices[0]
    notices.clear()
    generate(config(flow="auto", memory="sink"), tmp_path / "sink", reporter=Reporter(notices.append))
    assert notices == []  # nobody asked for flow
    assert json.loads((tmp_path / "sink" / "run.json").read_text())["config"]["flow"] == "auto"


def test_auto_is_world_flow_for_the_embedded_model_on_a_cpu(monkeypatch, random_raft):
    """In silence, whether or not there are weights of RAFT-small; on a GPU and for other models nothing changes."""
    embedded, other = EMBEDDED.backbone_spec(), UNTRAINED.backbone_spec()
    there = config(backbone="embedded", flow="auto", device="cpu")
    for home in (None, random_raft):
        if home:
            monkeypatch.setenv("RECAP_HOME", str(home))
        usual = "raft-small" if home else "classical"
        assert settle_flow(there, embedded, pytest.fail).flow == "world-flow"
        assert settle_flow(there, other, lambda _: None).flow == usual
        assert resolve_flow("auto", lambda _: None, backbone="embedded", device="cuda:0") == usual
    assert settle_flow(replace(there, flow="classical"), embedded, pytest.fail).flow == "classical"


def test_world_flow_is_refused_for_another_model_before_a_file_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"flow is 'world-flow'.*not those of `untrained`.*classical"):
        generate(config(flow="world-flow"), tmp_path / "run", reporter=SILENT)
    assert not (tmp_path / "run").exists()


def test_weights_are_fetched_for_a_run_that_looks_at_flow_and_can_be_generated(
    tmp_path, monkeypatch, random_raft
):
    fetched = []

    def fetch(*_):
        fetched.append(True)
        shutil.copy(random_raft / RAFT_SMALL.file_name, tmp_path)
        return tmp_path / RAFT_SMALL.file_name

    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    monkeypatch.delenv("RECAP_OFFLINE")
    monkeypatch.setattr("recap.io.fetch.PackedFile.fetch", fetch)
    monkeypatch.setattr("recap.flow._out_of_reach", set())
    short = [{"prompt": "a red boat", "seconds": 1}]
    for unneeded in ({"memory": "sink"}, {"memory": "none"}, {"admission": "random"}):
        generate(config(flow="auto", shots=short, **unneeded), tmp_path / str(unneeded), reporter=SILENT)
    wrong = config(flow="auto", backbone="embedded", shots=[{"prompt": "a xylophone", "seconds": 1}])
    with pytest.raises(ValueError, match="xylophone"):
        generate(wrong, tmp_path / "refused", reporter=SILENT)
    assert fetched == []
    generate(config(flow="auto", shots=short), tmp_path / "run", reporter=SILENT)
    assert fetched == [True]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["flow"] == "raft-small"


def edit(folder, **changes):
    about = json.loads((folder / "run.json").read_text())
    about["config"] |= changes
    (folder / "run.json").write_text(json.dumps(about))


def test_one_process_per_run(tmp_path):
    """A second one is turned away while the first is at work, and leaves its record alone."""
    folder, inside, done = tmp_path / "run", threading.Event(), threading.Event()

    def wait(finished, total, rate):
        inside.set()
        assert done.wait(60)

    worker = threading.Thread(target=lambda: generate(config(), folder, reporter=Reporter(quiet, wait)))
    worker.start()
    assert inside.wait(60)
    record = (folder / "run.json").read_bytes()
    try:
        with pytest.raises(ValueError, match="another process"):
            resume(folder, reporter=SILENT)
        with pytest.raises(ValueError, match="not empty"):
            generate(config(seeds=[3]), folder, reporter=SILENT)
    finally:
        done.set()
        worker.join()
    assert (folder / "run.json").read_bytes() == record


class Broken:
    """A backbone that generates NaN in its third block."""

    def __init__(self, real):
        self.real, self.generated = real, 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def denoise(self, noise, given, context):
        self.generated += 1
        made = self.real.denoise(noise, given, context)
        return made * torch.nan if self.generated == 3 else made


def test_latents_that_are_not_finite_stop_the_run_and_spoil_nothing(tmp_path, monkeypatch, backbone, whole):
    monkeypatch.setattr("recap.run.build_backbone", lambda *_: Broken(backbone))
    with pytest.raises(ValueError, match="NaN"):
        generate(config(memory="sink"), tmp_path / "run", reporter=SILENT)
    monkeypatch.undo()
    assert len((tmp_path / "run" / "trace.jsonl").read_text().splitlines()) == 2
    resume(tmp_path / "run", reporter=SILENT)


def test_other_versions_are_reported_once(tmp_path):
    folder = begun(tmp_path / "run", 2)
    about = json.loads((folder / "run.json").read_text())
    assert about["versions"] == versions() and about["versions"]["opencv-python-headless"] != "none"
    about["versions"]["torch"] = "1.0"
    (folder / "run.json").write_text(json.dumps(about))
    notices = []
    resume(folder, reporter=Reporter(notices.append))
    assert len(notices) == 1 and "other versions" in notices[0]


@pytest.mark.slow
def test_what_a_prompt_loses_is_reported_once_in_a_run(tmp_path, capsys):
    lines = []
    texts = ("a lion on a beach", "a boat on a beach", "a lion on a beach")
    shots = [{"prompt": text, "seconds": 0.5} for text in texts]
    two = config(shots=shots, seeds=[0, 1], backbone="embedded", memory="none")
    generate(two, tmp_path / "run", reporter=Reporter(lines.append))
    assert len(lines) == 1 and "'lion'" in lines[0] and "a cat is shown instead" in lines[0]
    assert capsys.readouterr().out == ""


def test_a_run_with_a_cast_resumes_to_the_same_bits_when_the_cast_is_gone(tmp_path, backbone):
    shots = [{"prompt": "@fox on the sea", "seconds": 3.0}]
    write_cast(tmp_path / "fox.cast", [subject_of(backbone.spec)])
    changes = {"shots": shots, "cast": [str(tmp_path / "fox.cast")]}
    whole = generate(config(**changes), tmp_path / "whole")
    stopped = begun(tmp_path / "stopped", 2, **changes)
    (tmp_path / "fox.cast").unlink()
    resume(stopped)
    for name in ("latents.safetensors", "trace.jsonl", "state.safetensors"):
        assert (stopped / name).read_bytes() == (whole.folder / name).read_bytes(), name
    changed = begun(tmp_path / "changed", 2, **(changes | {"cast": [str(stopped / "subjects.cast")]}))
    (subject,) = read_cast(changed / "subjects.cast")
    write_cast(changed / "subjects.cast", [replace(subject, words="a wolf")])
    with pytest.raises(ValueError, match=r"manifest\.jsonl"):
        resume(changed)
    line = read_trace(stopped / "trace.jsonl")[0]
    assert line.prompts == ("a fox on the sea",) and line.tokens["cast"] == 2


def test_a_picture_becomes_a_subject(tmp_path):
    write_png(tmp_path / "photo.png", np.full((128, 208, 3), 90, dtype=np.uint8))
    shots = [{"prompt": "@fox on a beach by day", "seconds": 0.75}]
    config = {"shots": shots, "cast": [f"fox={tmp_path / 'photo.png'}"], "flow": "classical"}
    made = generate(RunConfig.from_dict(config), tmp_path / "run")
    (subject,) = read_cast(made.folder / "subjects.cast")
    assert subject.name == "fox" and subject.num_tokens == 8 * 13
    assert read_trace(made.folder / "trace.jsonl")[0].tokens["cast"] == 8 * 13


def test_half_a_page_that_a_killed_process_left_in_a_finished_run_goes(whole, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    stray = folder / ".recap-0123.html"
    stray.write_text("half")
    before = {path.name for path in whole.folder.iterdir()}
    resume(folder, reporter=SILENT)
    assert {path.name for path in folder.iterdir()} == before
