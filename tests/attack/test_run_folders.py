"""Run folders that somebody changed, on purpose or by accident, end in the right result or in one line.

A stopped run is copied, one thing in it is changed, and `recap generate --resume` is called. Exit code 0 means that
latents, trace and state are those of an undisturbed run and that the video can be read; else the code is 2, and
the command says one line. Files outside the folder stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from recap.cli import main as cli
from recap.config import RunConfig
from recap.io.report import SILENT, Reporter
from recap.io.video import ClipWriter, open_clip
from recap.run import generate, resume

SHOTS = [{"prompt": "a red boat", "seconds": 2.25}, {"prompt": "a house", "seconds": 2.25}]
SETTINGS = {"shots": SHOTS, "backbone": "untrained", "flow": "classical"}
BLOCKS, STOPPED, PICTURES = 6, 4, 69
NESTED = b"[" * 100_000 + b"\n"


class Stop(Exception):
    pass


def stop_at(block):
    def progress(done, total, rate):
        if done == block and rate:
            raise Stop

    return Reporter(SILENT.notice, progress)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return generate(RunConfig.from_dict(SETTINGS), folder, reporter=SILENT).folder


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> dict[int, Path]:
    """Runs that were stopped after so many blocks."""
    found = {}
    for block in (2, STOPPED):
        found[block] = tmp_path_factory.mktemp("stopped") / "run"
        with pytest.raises(Stop):
            generate(RunConfig.from_dict(SETTINGS), found[block], reporter=stop_at(block))
    return found


@pytest.fixture
def run(tmp_path, states) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(states[STOPPED], tmp_path / "run"))


@pytest.fixture
def recap(monkeypatch, capsys):
    """Run a command in this process; returns its exit code and the lines of its error, if any."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        lines = capsys.readouterr().err.splitlines()
        return stopped.value.code or 0, [line for line in lines if line.startswith("error: ")]

    return call


def is_right(folder: Path, whole: Path) -> None:
    for name in ("latents.safetensors", "trace.jsonl", "state.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert sum(1 for _ in open_clip(folder / "video.mp4").pictures()) == PICTURES
    assert not (folder / "work").exists()


def refused(outcome, *words: str) -> None:
    code, errors = outcome
    assert code == 2 and len(errors) == 1, outcome
    for word in words:
        assert word in errors[0], errors[0]


# Ways to change things. Each takes the run's folder.


def part(block: int, kind: str) -> str:
    return f"work/{block:06d}.safetensors" if kind == "latents" else f"work/row0-{block:06d}.mp4"


def remove(name):
    def change(run):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def write(name, data):
    return lambda run: (run / name).write_bytes(data)


def cut(name, size):
    return lambda run: os.truncate(run / name, (run / name).stat().st_size - size)


def flip(name, where=0.7, keep_time=False):
    """Change one bit; a bad disk leaves the time as it was."""

    def change(run):
        path = run / name
        data, stat = bytearray(path.read_bytes()), path.stat()
        data[int(where * len(data))] ^= 4
        path.write_bytes(data)
        if keep_time:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return change


def swap(one, other):
    def change(run):
        (run / one).rename(run / "aside")
        (run / other).rename(run / one)
        (run / "aside").rename(run / other)

    return change


def edit_state(**changes):
    """Replace values of the state, and drop those that are None; what else the file says stays."""

    def change(run):
        path = run / "state.safetensors"
        with safe_open(path, "pt") as file:
            about = file.metadata()
        state = load_file(path)
        for name, value in changes.items():
            name = name.replace("__", ".")
            made = value(state[name]) if callable(value) else value
            state = {key: old for key, old in state.items() if key != name}
            state |= {} if made is None else {name: made.contiguous()}
        save_file(state, path, metadata=about)

    return change


def edit_latents(block, change_tensor, name="latents"):
    def change(run):
        path = run / part(block, "latents")
        save_file({name: change_tensor(load_file(path)["latents"]).contiguous()}, path)

    return change


def other_clip(block, pictures, size=(64, 96)):
    def change(run):
        with ClipWriter(run / part(block, "clip"), size, 16) as clip:
            clip.write(torch.rand(pictures, 3, *size))

    return change


def edit_lines(name, change_line, block=1):
    """Replace one line of a file of lines."""

    def change(run):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        index = block + (name == "manifest.jsonl")
        lines[index] = change_line(lines[index])
        (run / name).write_bytes(b"".join(lines))

    return change


def edit_json(**changes):
    def edit(line):
        found = json.loads(line) | changes
        kept = {key: value for key, value in found.items() if value is not None}
        return json.dumps(kept).encode() + b"\n"

    return edit


def edit_config(**changes):
    def change(run):
        about = json.loads((run / "run.json").read_text())
        about["config"] |= changes
        (run / "run.json").write_text(json.dumps(about))

    return change


def edit_about(**changes):
    def change(run):
        about = json.loads((run / "run.json").read_text()) | changes
        (run / "run.json").write_text(json.dumps(about))

    return change


def link(name, target="victim"):
    """Put a link to something outside the folder in place of a file."""

    def change(run):
        path = run / name
        if path.is_dir():
            path.rename(run.parent / "moved")
            path.symlink_to(run.parent / "moved")
            return
        path.unlink(missing_ok=True)
        path.symlink_to(run.parent / target)

    return change


def fifo(name):
    def change(run):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def other_state(run):
    """Put the state of a run with another seed there, as it was written."""
    with pytest.raises(Stop):
        generate(
            RunConfig.from_dict({**SETTINGS, "seeds": [9]}), run.parent / "seed", reporter=stop_at(STOPPED)
        )
    shutil.copy(run.parent / "seed" / "state.safetensors", run)


CHANGED = {
    # The state, as a file.
    "state: missing": remove("state.safetensors"),
    "state: empty": write("state.safetensors", b""),
    "state: text": write("state.safetensors", b"no state\n" * 40),
    "state: cut": cut("state.safetensors", 100),
    "state: longer": lambda run: (run / "state.safetensors").open("ab").write(b"more"),
    "state: a bit of a value": flip("state.safetensors"),
    "state: a bit of a value, same time": flip("state.safetensors", keep_time=True),
    "state: a bit of the header": flip("state.safetensors", 0.001),
    "state: a folder": lambda run: (remove("state.safetensors")(run), (run / "state.safetensors").mkdir()),
    "state: of another seed": other_state,
    # The state's values.
    "state: nothing in it": lambda run: save_file({}, run / "state.safetensors"),
    "next_block: missing": edit_state(next_block=None),
    "next_block: 0": edit_state(next_block=torch.tensor(0)),
    "next_block: 1": edit_state(next_block=torch.tensor(1)),
    "next_block: too large": edit_state(next_block=torch.tensor(10**6)),
    "next_block: negative": edit_state(next_block=torch.tensor(-1)),
    "next_block: infinite": edit_state(next_block=torch.tensor(torch.inf)),
    "next_block: nan": edit_state(next_block=torch.tensor(torch.nan)),
    "next_block: vector": edit_state(next_block=torch.tensor([2, 3])),
    "next_block: fraction": edit_state(next_block=torch.tensor(2.5)),
    "window.frames: missing": edit_state(policy__window__frames=None),
    "window.frames: too many": edit_state(policy__window__frames=torch.tensor([99, 99])),
    "window.frames: negative": edit_state(policy__window__frames=torch.tensor([-5, 2])),
    "window.frames: scalar": edit_state(policy__window__frames=torch.tensor(2)),
    "window.frames: float": edit_state(policy__window__frames=torch.tensor([1.0, 2.0])),
    "sink.keys: missing": edit_state(policy__sink__keys=None),
    "sink.values: missing": edit_state(policy__sink__values=None),
    "sink: missing": edit_state(policy__sink__keys=None, policy__sink__values=None),
    "sink.keys: whole numbers": edit_state(policy__sink__keys=lambda keys: keys.long()),
    "sink.keys: half": edit_state(policy__sink__keys=lambda keys: keys.half()),
    "sink.keys: fewer layers": edit_state(policy__sink__keys=lambda keys: keys[:1]),
    "prior: missing": edit_state(policy__prior__keys=None, policy__prior__values=None),
    "prior.values: doubled": edit_state(policy__prior__values=lambda values: 2 * values),
    "prior.keys: nan": edit_state(policy__prior__keys=lambda keys: keys * torch.nan),
    "bank.count: missing": edit_state(policy__bank__count=None),
    "bank.count: too large": edit_state(policy__bank__count=torch.tensor(9999)),
    "bank.count: negative": edit_state(policy__bank__count=torch.tensor(-1)),
    "bank.score: nan": edit_state(policy__bank__score=lambda score: score * torch.nan),
    "bank.score: shorter": edit_state(policy__bank__score=lambda score: score[:, :3]),
    "bank.source: far away": edit_state(policy__bank__source=lambda source: source + 10**9),
    "bank.source: negative": edit_state(policy__bank__source=lambda source: source * 0 - 7),
    "bank.keys: other rows": edit_state(policy__bank__keys=lambda keys: keys.repeat(1, 2, 1, 1, 1)),
    "admission.last: missing": edit_state(policy__admission__last=None),
    "admission.last: other shape": edit_state(policy__admission__last=torch.rand(1, 3, 8, 8)),
    "decoder.last: missing": edit_state(decoder__last=None),
    "decoder.last: other shape": edit_state(decoder__last=torch.rand(1, 16, 2, 2)),
    "state: one value more": lambda run: save_file(
        {**load_file(run / "state.safetensors"), "more": torch.ones(1)}, run / "state.safetensors"
    ),
    # Latents of a block.
    "latents: missing": remove(part(1, "latents")),
    "latents: empty": write(part(1, "latents"), b""),
    "latents: text": write(part(1, "latents"), b"12"),
    "latents: cut": cut(part(1, "latents"), 64),
    "latents: another name": edit_latents(1, lambda x: x, name="other"),
    "latents: nan": edit_latents(1, lambda x: x * torch.nan),
    "latents: nan in the last block": edit_latents(3, lambda x: x * torch.nan),
    "latents: other values": edit_latents(1, torch.rand_like),
    "latents: half precision": edit_latents(1, lambda x: x.half()),
    "latents: a frame fewer": edit_latents(1, lambda x: x[:, 1:]),
    "latents: a row more": edit_latents(1, lambda x: x.repeat(2, 1, 1, 1, 1)),
    "latents: a bit, same time": flip(part(1, "latents"), keep_time=True),
    "latents: a bit of the first block, same time": flip(part(0, "latents"), keep_time=True),
    "latents: a bit of the last block, same time": flip(part(3, "latents"), keep_time=True),
    "latents: swapped": swap(part(1, "latents"), part(2, "latents")),
    "latents: a folder": lambda run: (remove(part(1, "latents"))(run), (run / part(1, "latents")).mkdir()),
    # The clip of a block.
    "clip: missing": remove(part(2, "clip")),
    "clip: empty": write(part(2, "clip"), b""),
    "clip: text": write(part(2, "clip"), b"no clip"),
    "clip: cut": cut(part(1, "clip"), 500),
    "clip: longer": other_clip(1, 30),
    "clip: other pictures": other_clip(1, 12),
    "clip: another size": other_clip(1, 12, (32, 32)),
    "clip: swapped": swap(part(1, "clip"), part(2, "clip")),
    "clip: a bit, same time": flip(part(1, "clip"), keep_time=True),
    "work: missing": remove("work"),
    "work: a file": lambda run: (remove("work")(run), write("work", b"")(run)),
    # The lists.
    "trace: missing": remove("trace.jsonl"),
    "trace: empty": write("trace.jsonl", b""),
    "trace: binary": write("trace.jsonl", bytes(range(256)) * 8),
    "trace: garbage": write("trace.jsonl", b"garbage\n"),
    "trace: other objects": write("trace.jsonl", b'{"a": 1}\n' * 4),
    "trace: lists": write("trace.jsonl", b"[1, 2]\n" * 4),
    "trace: nested": edit_lines("trace.jsonl", lambda line: NESTED),
    "trace: another prompt": edit_lines("trace.jsonl", edit_json(prompts=["a cat"])),
    "trace: shorter": cut("trace.jsonl", 300),
    "timing: missing": remove("timing.jsonl"),
    "timing: no seconds": edit_lines("timing.jsonl", edit_json(seconds=None)),
    "timing: text": edit_lines("timing.jsonl", edit_json(seconds="soon")),
    "timing: infinite": edit_lines("timing.jsonl", edit_json(seconds=float("inf"))),
    "timing: nested": edit_lines("timing.jsonl", lambda line: NESTED),
    "manifest: missing": remove("manifest.jsonl"),
    "manifest: empty": write("manifest.jsonl", b""),
    "manifest: binary": write("manifest.jsonl", bytes(range(256)) * 8),
    "manifest: another config": edit_lines("manifest.jsonl", edit_json(config="0" * 32), -1),
    "manifest: nested": edit_lines("manifest.jsonl", lambda line: NESTED),
    "manifest: shorter": cut("manifest.jsonl", 400),
    "manifest: no files": edit_lines("manifest.jsonl", edit_json(files=[])),
    "manifest: odd files": edit_lines("manifest.jsonl", edit_json(files=[[1, 2, 3], 4])),
    "manifest: another digest": edit_lines("manifest.jsonl", edit_json(lines=["0" * 32, "0" * 32])),
    "manifest: another block": edit_lines("manifest.jsonl", edit_json(block=7)),
    # The record.
    "record: missing": remove("run.json"),
    "record: empty": write("run.json", b""),
    "record: binary": write("run.json", bytes(range(256))),
    "record: nested": write("run.json", NESTED),
    "record: a list": write("run.json", b"[]"),
    "record: digits without end": write("run.json", b"1" * 10_000),
    "record: config is a number": edit_about(config=5),
    "record: another seed": edit_config(seeds=[7]),
    "record: seeds of text": edit_config(seeds=["a"]),
    "record: no seeds": edit_config(seeds=[]),
    "record: 100,000 seeds": edit_config(seeds=list(range(100_000))),
    "record: another memory": edit_config(memory="sink"),
    "record: another precision": edit_config(dtype="bfloat16"),
    "record: another device": edit_config(device="tpu"),
    "record: another prompt": edit_config(shots=[{"prompt": "a cat", "seconds": 4.5}]),
    "record: 10,000 days": edit_config(shots=[{"prompt": "a cat", "seconds": 86_400}] * 10_000),
    "record: an opening": edit_config(opening="/etc/passwd"),
    "record: no spec": edit_about(spec=None),
    "record: another spec": lambda run: edit_about(
        spec=json.loads((run / "run.json").read_text())["spec"] | {"layers": 9}
    )(run),
    "record: unknown setting": edit_config(colour="red"),
    "record: code as memory": edit_config(memory={"name": "payload:X"}),
    "record: code as admission": edit_config(admission="payload:X"),
    "record: code as backbone": edit_config(backbone={"name": "os:system"}),
    # Links and devices.
    **{
        f"link: {name}": link(name)
        for name in (
            "run.json", "state.safetensors", "trace.jsonl", "timing.jsonl", "manifest.jsonl", "summary.json",
            "video.mp4", "latents.safetensors", "index.html", ".lock", "work", part(1, "latents"), part(1, "clip"),
            part(4, "latents"), part(4, "clip"), "opening.safetensors",
        )
    },
    "link: to nothing": link("video.mp4", "nothing"),
    "device: trace": fifo("trace.jsonl"),
    "device: record": fifo("run.json"),
    "device: lock": fifo(".lock"),
}  # fmt: skip


def copy_back(run):
    """Put an earlier state of the same run there: it is true, only older."""
    shutil.copy(run.parent / "earlier.safetensors", run / "state.safetensors")


HARMLESS = {
    "nothing": lambda run: None,
    "other times": lambda run: [path.touch() for path in run.rglob("*") if path.is_file()],
    "other versions": edit_about(versions={"torch": "1.0"}),
    "versions of another kind": edit_about(versions=[1]),
    "an earlier state": copy_back,
    "a later line of the trace": lambda run: (run / "trace.jsonl").open("ab").write(b'{"block": 4}\n'),
    "half a line of the trace": lambda run: (run / "trace.jsonl").open("ab").write(b'{"blo'),
    "half a line of the manifest": lambda run: (run / "manifest.jsonl").open("ab").write(b'{"blo'),
    "a later line of the manifest": lambda run: (run / "manifest.jsonl").open("ab").write(b"[]\n"),
    "a part of a later block": write(part(4, "latents"), b"half"),
    "a stray": write(".recap-0123.mp4", b"half"),
    "a stray among the parts": write("work/.recap-0123.mp4", b"half"),
    "somebody's notes": write("notes.txt", b"mine"),
    "a lock that was left": write(".lock", b"old"),
    "summary: forged": write("summary.json", b"{}"),
    "summary: forged with a video": write("summary.json", b'{"blocks": 6, "seconds": 1, "videos": ["video.mp4"]}'),
    "summary: garbage": write("summary.json", b"garbage"),
    "summary: a list": write("summary.json", b"[]"),
    "summary: nested": write("summary.json", NESTED),
    "summary: videos elsewhere": write("summary.json", b'{"videos": ["../../video.mp4"], "files": {}}'),
    "video: something else": write("video.mp4", b"no video"),
    "results: something else": write("latents.safetensors", b"no latents"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_stopped_run_that_was_changed_is_refused_in_one_line(recap, run, name):
    victim = run.parent / "victim"
    victim.write_bytes(b"precious")
    CHANGED[name](run)
    code, errors = recap("generate", "--resume", run)
    assert code == 2 and len(errors) == 1 and "Traceback" not in errors[0], (code, errors)
    assert victim.read_bytes() == b"precious"
    assert not (run / "summary.json").is_file() or name == "link: summary.json"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_ends_in_the_right_result(recap, run, states, whole, name):
    shutil.copy(states[2] / "state.safetensors", run.parent / "earlier.safetensors")
    HARMLESS[name](run)
    code, errors = recap("generate", "--resume", run)
    assert code == 0, errors
    is_right(run, whole)


ENDED = {
    "video: missing": remove("video.mp4"),
    "video: cut": cut("video.mp4", 100),
    "video: a bit": flip("video.mp4", keep_time=True),
    "latents: cut": cut("latents.safetensors", 100),
    "trace: missing": remove("trace.jsonl"),
    "trace: cut": cut("trace.jsonl", 100),
    "manifest: missing": remove("manifest.jsonl"),
    "summary: forged": write("summary.json", b"{}"),
    "summary: missing": remove("summary.json"),
    "record: another seed": edit_config(seeds=[7]),
    "link: page": link("index.html"),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_finished_run_that_was_changed_is_refused(recap, tmp_path, whole, name):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (tmp_path / "victim").write_bytes(b"precious")
    ENDED[name](run)
    refused(recap("generate", "--resume", run))
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_finished_run_may_lose_its_latents(recap, tmp_path, whole):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "latents.safetensors").unlink()
    assert recap("generate", "--resume", run)[0] == 0


@pytest.mark.parametrize(
    ("damage", "whole_blocks"),
    [
        (flip(part(2, "latents")), 2),
        (flip(part(2, "latents"), keep_time=True), 2),
        (remove(part(1, "clip")), 1),
        (edit_lines("trace.jsonl", lambda line: b"{}\n", 3), 3),
        (flip("state.safetensors"), 4),
        (remove("state.safetensors"), 4),
        (remove("work"), 0),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_is_generated_again(recap, run, whole, damage, whole_blocks):
    """The state is of no use then: memory and decoder are made again from the latents that are whole."""
    damage(run)
    (code, (error,)) = recap("generate", "--resume", run)
    assert code == 2 and f"the first {whole_blocks} blocks are whole" in error
    assert f"--from-block {whole_blocks}" in error
    times = (run / "timing.jsonl").read_bytes().splitlines()[:whole_blocks]
    code, errors = recap("generate", "--resume", run, "--from-block", whole_blocks)
    assert code == 0, errors
    is_right(run, whole)
    assert (run / "timing.jsonl").read_bytes().splitlines()[:whole_blocks] == times


def test_a_block_that_is_not_whole_cannot_be_kept(recap, run):
    flip(part(1, "latents"))(run)
    refused(recap("generate", "--resume", run, "--from-block", 3), "000001.safetensors", "--from-block 1")
    refused(recap("generate", "--resume", run, "--from-block", 5), "must be 0 to 4")
    refused(recap("generate", "--resume", run, "--from-block", -1), "must be 0 to 4")
    refused(recap("generate", "a boat", "--from-block", 1), "--resume")
    with pytest.raises(ValueError, match="from-block"):
        resume(run, reporter=SILENT, from_block=True)


def test_stopped_while_the_memory_is_made_again_it_resumes_as_before(run, whole, monkeypatch):
    """Until the memory is there, nothing in the folder changes; after that, the new state counts."""

    def stop(*_):
        raise Stop

    for moment in ("_checkpoint", "_generate"):
        with monkeypatch.context() as patch:
            patch.setattr(f"recap.run.RunParts.{moment}", stop)
            with pytest.raises(Stop):
                resume(run, reporter=SILENT, from_block=2)
    resume(run, reporter=SILENT)
    is_right(run, whole)


PAYLOAD = """
from dataclasses import dataclass
from pathlib import Path
from recap.memory.sink import SinkConfig
Path(__file__).with_name("ran").touch()

@dataclass(frozen=True)
class X(SinkConfig):
    pass
"""


@pytest.fixture
def stranger(run, monkeypatch):
    """A stranger's folder: a record that names code, and the code next to it."""
    monkeypatch.chdir(run)
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    (run / "payload.py").write_text(PAYLOAD)
    edit_config(memory={"name": "payload:X"})(run)
    return run


def test_code_that_a_file_names_runs_only_when_trusted(recap, stranger):
    for words in (("generate", "--from", "run.json"), ("generate", "--resume", "."), ("show", ".")):
        refused(recap(*words), "memory", "payload:X", "--trust-code")
    with pytest.raises(ValueError, match="trust_code=True"):
        resume(stranger, reporter=SILENT)
    assert not (stranger / "ran").exists()
    assert recap("generate", "--from", "run.json", "--trust-code", "--out", "new")[0] == 0
    assert (stranger / "ran").exists()
    assert recap("generate", "--resume", "new", "--trust-code")[0] == 0
    assert recap("show", "new", "--trust-code")[0] == 0
    refused(recap("show", "new"), "payload:X")


def test_code_that_a_flag_names_runs(recap, stranger):
    assert recap("generate", "--from", "run.json", "--memory", "sink", "--out", "plain")[0] == 0
    assert not (stranger / "ran").exists()
    assert (
        recap("generate", "a boat", "--seconds", "1", "--backbone", "untrained", "--memory", "payload:X")[0]
        == 0
    )
    assert (stranger / "ran").exists()


def test_bench_checks_names_as_the_other_commands_do(recap):
    refused(recap("bench", "--backbone", "untrained", "--memory", "os:system", "--blocks", "3"), "os:system")
    refused(recap("bench", "--backbone", "os:system", "--blocks", "3"), "os:system")


@pytest.mark.parametrize("left", [(".lock",), (".recap-12.json",), (".lock", "opening.safetensors"), ()])
def test_a_folder_with_what_a_kill_left_is_empty(tmp_path, left):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in left:
        (folder / name).write_bytes(b"")
    short = RunConfig.from_dict({**SETTINGS, "shots": [{"prompt": "a", "seconds": 1}]})
    assert generate(short, folder, reporter=SILENT).num_blocks == 1


@pytest.mark.parametrize("name", [".lock", "notes.txt"])
def test_a_new_run_does_not_write_through_links(recap, tmp_path, name):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    refused(recap("generate", "a boat", "--backbone", "untrained", "--out", tmp_path / "run"), name)
    assert (tmp_path / "victim").read_bytes() == b"precious"
