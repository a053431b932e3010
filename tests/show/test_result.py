"""A run as an object: what one call from Python gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import recap
from recap import run as runs
from recap.config import RunConfig, resolve_device, resolve_dtype
from recap.io.report import SILENT, Reporter
from recap.io.run_folder import new_folder
from recap.io.video import ClipWriter
from recap.registry import BACKBONES
from recap.show.result import print_progress
from recap.show.run_page import write_run_page

SMALL = {"backbone": "untrained", "flow": "classical"}


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> recap.Run:
    folder = tmp_path_factory.mktemp("made") / "run"
    return recap.generate("a red boat", seconds=2, folder=folder, reporter=SILENT, **SMALL)


def test_a_prompt_becomes_a_run(made: recap.Run) -> None:
    assert made.video.name == "video.mp4" and made.videos == (made.video,)
    assert made.pictures.dtype == np.uint8 and made.pictures.shape[0] == round(made.seconds * 16)
    assert made.pictures.shape[-1] == 3 and made.pictures is made.pictures
    assert [line.block for line in made.trace] == [0, 1, 2]
    assert made.config.memory.name == "recap" and made.config.shots[0].prompt == "a red boat"
    assert made._repr_html_().startswith('<video src="data:video/mp4;base64,')
    assert repr(made) == f"Run({str(made.folder)!r})"
    again = recap.Run(str(made.folder))
    assert again.video == made.video and again.config == made.config


def test_the_page_of_a_run_shows_video_bank_shares_and_settings(made: recap.Run) -> None:
    page = (made.folder / "index.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (method,) = data["methods"]
    assert 'src="data:video/mp4;base64,' in page and "a red boat" in page and "untrained" in page
    assert method["name"] == "recap" and len(method["shares"]) == 3 and method["bank"] is not None
    assert "reinforcement" in page and page.count("<video") == 1


def test_show_writes_the_page_where_it_is_missing_and_opens_it(
    made: recap.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    (made.folder / "index.html").unlink()
    page = made.show()
    assert page.is_file() and opened == [page.resolve().as_uri()]
    assert made.show(browser=False) == page and len(opened) == 1


def test_a_run_of_an_older_version_has_a_page_too(made: recap.Run, tmp_path: Path) -> None:
    """It recorded no spec: the backbone is asked."""
    about = json.loads((made.folder / "run.json").read_text())
    spec = about.pop("spec")
    for name in ("summary.json", "trace.jsonl", "timing.jsonl", "video.mp4"):
        (tmp_path / name).write_bytes((made.folder / name).read_bytes())
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert write_run_page(tmp_path).read_text() == (made.folder / "index.html").read_text()
    assert runs.read_spec({**about, "spec": spec}) == runs.read_spec(about)


def test_a_batch_shows_its_first_row(tmp_path: Path) -> None:
    shots = [{"prompt": "a boat", "seconds": 1}]
    config = RunConfig.from_dict({**SMALL, "shots": shots, "seeds": [0, 1]})
    record = runs.generate(config, tmp_path / "run", reporter=SILENT)
    page = write_run_page(record.folder).read_text()
    assert "row 0 of 2" in page and page.count("<video") == 1
    assert [path.name for path in recap.Run(record.folder).videos] == ["video-0.mp4", "video-1.mp4"]


def test_the_pictures_that_a_run_continues_are_on_its_page(made: recap.Run, tmp_path: Path) -> None:
    with ClipWriter(tmp_path / "opening.mp4", (128, 208), 16) as clip:
        clip.write(torch.rand(5, 3, 128, 208))
    run = recap.generate(
        "a boat on a beach",
        seconds=0.5,
        memory="none",
        opening=str(tmp_path / "opening.mp4"),
        folder=tmp_path / "run",
        reporter=SILENT,
    )
    data = json.loads(run.show(browser=False).read_text().split('id="data">')[1].split("</script>")[0])
    assert data["duration"] == pytest.approx(run.seconds, abs=1e-3) and len(data["blocks"]) == len(run.trace)


def test_what_is_not_a_finished_run_is_refused(tmp_path: Path, made: recap.Run) -> None:
    with pytest.raises(recap.RecapError, match=r"run\.json"):
        recap.Run(tmp_path)
    (tmp_path / "run.json").write_bytes((made.folder / "run.json").read_bytes())
    for attempt in (recap.Run, write_run_page):
        with pytest.raises(recap.RecapError, match="--resume"):
            attempt(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("trace.jsonl", "", "0 of 3 blocks"),
        ("trace.jsonl", '{"block": 0', "0 of 3 blocks"),
        ("timing.jsonl", "", "0 of 3 blocks"),
        ("timing.jsonl", '{"block": 0}\n' * 3, "block 0 of .*timing.jsonl has no usable time"),
        (
            "timing.jsonl",
            '{"block": 0, "seconds": "x"}\n' * 3,
            "block 0 of .*timing.jsonl has no usable time",
        ),
        ("summary.json", "", "is not JSON"),
        ("summary.json", "[]", "names no videos or blocks"),
        ("summary.json", '{"videos": [3]}', "names no videos or blocks"),
    ],
)
def test_files_of_a_run_that_were_cut_short_are_refused(
    made: recap.Run, tmp_path: Path, name: str, content: str, problem: str
) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "run"))
    (folder / name).write_text(content)
    before = (folder / "index.html").read_bytes()
    with pytest.raises(recap.RecapError, match=problem):
        write_run_page(folder)
    assert (folder / "index.html").read_bytes() == before
    if name == "summary.json":
        with pytest.raises(recap.RecapError, match=problem):
            recap.Run(folder)


def test_a_length_that_blocks_cannot_make_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    recap.generate(
        [recap.Shot("a boat", 1.0)],
        memory="none",
        folder=tmp_path / "run",
        reporter=Reporter(lines.append, print_progress),
        **SMALL,
    )
    assert lines == ["length: 0.56 s where 1 s were asked for: a video is made of whole blocks"]
    printed = capsys.readouterr().err
    assert printed.endswith("pictures/s\n") and "\rgenerating: 1 of 1 blocks" in printed


def test_a_stopped_run_is_resumed_from_python(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int, rate: float) -> None:
        if done == 1 and rate:
            raise Stop

    with pytest.raises(Stop):
        recap.generate("a boat", seconds=2, folder=tmp_path / "run", reporter=Reporter(quiet, stop), **SMALL)
    run = recap.resume(tmp_path / "run", reporter=SILENT)
    assert len(run.trace) == 3 and run.show(browser=False).is_file()


def test_folders_are_named_after_time_prompt_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20261116-082017")
    for prompt, memory, name in (
        ("A fox, on a beach!", "recap", "20261116-082017-a-fox-on-a-beach-recap"),
        ("", "none", "20261116-082017-none"),
        ("word " * 30, "sink", "20261116-082017-" + "word-" * 9 + "sink"),
        ("x" * 300, "sink", "20261116-082017-" + "x" * 48 + "-sink"),
    ):
        folder = new_folder(prompt, memory)
        assert folder == Path("runs") / name
        folder.mkdir(parents=True)
        assert new_folder(prompt, memory) == Path("runs") / f"{name}-2"


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shots = {"shots": [{"prompt": "", "seconds": 1}]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = RunConfig.from_dict(shots)
    assert (config.device, config.dtype) == ("cpu", "float32")
    assert config.to_dict()["device"] == "cpu" and config.to_dict()["dtype"] == "float32"
    assert resolve_dtype("auto", "cpu", BACKBONES["longlive"]) == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"
    chosen = {name: resolve_dtype("auto", "cuda", kind) for name, kind in BACKBONES.items()}
    assert {name for name, dtype in chosen.items() if dtype == "float32"} == {"embedded", "untrained"}
    assert set(chosen.values()) == {"float32", "bfloat16"}
    assert resolve_dtype("float16", "cuda", BACKBONES["longlive"]) == "float16"


def test_every_public_name_is_listed() -> None:
    assert all(hasattr(recap, name) for name in recap.__all__)
    assert {"generate", "Run", "RunConfig", "RecapError", "rollout", "attach"} <= set(recap.__all__)
    assert issubclass(recap.RecapError, ValueError)
    assert (Path(recap.__file__).parent / "py.typed").is_file()


def test_the_package_imports_with_torch_numpy_and_safetensors_alone() -> None:
    program = """
import sys
class Core:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"av", "typer", "rich", "cv2", "diffusers", "transformers", "torchvision", "ray"}:
            raise ImportError(name + " is not installed")
sys.meta_path.insert(0, Core())
import recap
print(recap.generate.__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "generate", done.stderr
