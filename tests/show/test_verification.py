"""`recap verify` judges pictures by what they are, knows published files by their hash, writes page and record."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recap.backbones.helios.family import HeliosBaseConfig, HeliosDistilledConfig, HeliosMidConfig
from recap.backbones.wan import published
from recap.backbones.wan.family import CausalForcing1StepConfig, SelfForcingConfig
from recap.backbones.wan.spec import UNTRAINED
from recap.cli.main import main
from recap.io.report import SILENT
from recap.show.models import ModelChoice
from recap.show.run_page import contrast
from recap.show.verification import (
    LEAST,
    VerifySettings,
    check_files,
    check_opening,
    motion_of,
    overheads,
    shrunk,
    smoothness_of,
)
from recap.show.verification_page import verdict, write_verification

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--seconds", "1.5", "--device", "cpu", "--flow", "classical")
SMALL = replace(UNTRAINED, name="self-forcing", layers=2, latent_size=(4, 6))


@pytest.fixture
def recap(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def test_a_grey_a_noisy_and_a_frozen_video_are_told_from_a_picture_that_moves():
    grey, noise = torch.full((3, 32, 48), 0.5), torch.rand(3, 32, 48)
    ramp = torch.linspace(0, 1, 48).expand(3, 32, 48)
    as_bytes = {
        name: (x * 255).byte().permute(1, 2, 0).numpy() for name, x in (("grey", grey), ("ramp", ramp))
    }
    assert contrast(as_bytes["grey"]) < LEAST["contrast"] < contrast(as_bytes["ramp"])
    assert smoothness_of(grey) == 0 and smoothness_of(noise) < LEAST["smoothness"] < smoothness_of(ramp)
    assert motion_of(ramp.expand(4, -1, -1, -1)) == 0 < LEAST["motion"]
    assert motion_of(torch.stack([ramp, ramp.roll(1, dims=-1)])) > LEAST["motion"]
    assert shrunk(torch.rand(3, 480, 832)).shape == (120, 208, 3) and shrunk(ramp).shape == (32, 48, 3)


@pytest.fixture(scope="module")
def embedded():
    choice = ModelChoice.of("embedded", device="cpu", flow="classical")
    return choice, choice.load(VerifySettings().prompts, lambda line: None)


@pytest.mark.parametrize("broken", ["none", "nan", "grey"])
def test_the_first_block_of_the_embedded_model_passes_and_a_broken_decoder_does_not(
    embedded, monkeypatch, broken
):
    choice, parts = embedded
    open_decoder = parts.backbone.open_decoder

    def spoiled():
        decoder = open_decoder()
        decode = decoder.decode
        factor = {"none": 1.0, "nan": float("nan"), "grey": 1e-3}[broken]
        decoder.decode = lambda latents: 0.5 + factor * (decode(latents) - 0.5)
        return decoder

    monkeypatch.setattr(parts.backbone, "open_decoder", spoiled)
    checks = check_opening(parts, choice, VerifySettings())["checks"]
    failed = {name for name, check in checks.items() if check["passed"] is False}
    assert failed == {"none": set(), "nan": {"finite"}, "grey": {"contrast", "motion"}}[broken]


def test_published_files_are_known_by_their_hash(tmp_path, monkeypatch):
    content = {name: name.encode() for name in ("model.pt", "text.pth", "vae.pth", "spiece.model")}
    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    files = {
        name: published.PublicFile("a/b", name, len(data), hashlib.sha256(data).hexdigest())
        for name, data in content.items()
    }
    own = published.WeightSet(
        files["model.pt"], None, "", text_encoder=files["text.pth"], autoencoder=files["vae.pth"],
        tokenizer=(files["spiece.model"],),
    )  # fmt: skip
    monkeypatch.setitem(published.SETS, "self-forcing", own)
    for name, data in content.items():
        files[name].path.parent.mkdir(parents=True, exist_ok=True)
        files[name].path.write_bytes(data)
    files["vae.pth"].path.write_bytes(b"vae.ptx")
    found = {each["file"]: each["verdict"] for each in check_files(SelfForcingConfig(), SILENT)}
    assert found.keys() == content.keys()
    assert found["model.pt"] == "as published: a/b/model.pt" and found["vae.pth"].startswith(
        "NOT the published"
    )


def test_a_page_a_record_and_videos_are_written(recap, tmp_path):
    code, output, error = recap("verify", "untrained", "--prompt", "a boat", "--prompt", "a <b>", *SHORT)
    assert code == 0, error
    folder = tmp_path / "verify-untrained"
    record = json.loads((folder / "verify.json").read_text())
    assert record["passed"] and record["files"] == []
    assert [(run["prompt"], run["memory"]) for run in record["runs"]] == [
        (prompt, memory) for prompt in ("a boat", "a <b>") for memory in ("none", "sink", "recap")
    ]
    assert all(
        run["blocks"] == 2 and run["finite"] and run["block_ms"]["median"] > 0 for run in record["runs"]
    )
    assert record["overhead"]["none"] == 1.0 and record["runs"][2]["bank_tokens"] > 0
    # What only a trained model can pass is not judged.
    assert record["weights"] == "random" and "untrained (random weights)" in output
    assert record["checks"]["first block: finite"] and record["checks"]["first block: contrast"] is None
    page = (folder / "index.html").read_text()
    assert "a &lt;b&gt;" in page and "<b>" not in page.partition("a &lt;b&gt;")[2][:200]
    videos = {f"prompt-{n}{of}.mp4" for n in (1, 2) for of in ("", "-none", "-sink", "-recap")}
    assert {path.name for path in folder.iterdir()} == {"index.html", "verify.json", *videos}
    assert "3 of 3 checks passed, 3 not judged" in output
    # The same again replaces it; a folder with something else in it is not touched.
    (folder / "mine").write_text("kept")
    code, _, error = recap("verify", "untrained", *SHORT)
    assert code == 2 and "mine" in error and (folder / "mine").is_file()


@pytest.mark.parametrize("kind", [SelfForcingConfig, CausalForcing1StepConfig])
def test_random_weights_need_no_file(monkeypatch, tmp_path, kind):
    """With its row made small, as at real size a CPU takes hours; also for a model that generates frame by frame."""
    small = replace(
        SMALL, name=kind.row.name, frames_per_block=kind.row.frames_per_block, steps=kind.row.steps
    )
    monkeypatch.setattr(kind, "row", small)
    choice = ModelChoice.of(small.name, device="cpu", random_weights=True, decoder="tiny")
    settings = VerifySettings(("a boat",), ("none", "recap"), seconds=1.5)
    record = write_verification(choice, settings, tmp_path / "out")
    assert (
        record["passed"]
        and record["weights"] == "random"
        and record["runs"][0]["blocks"] == 6 // small.frames_per_block
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "verify.json"}
    assert "not judged" in verdict(record)


@pytest.mark.parametrize("kind", [HeliosDistilledConfig, HeliosMidConfig, HeliosBaseConfig])
def test_random_weights_of_the_other_family_need_no_file_either(monkeypatch, tmp_path, kind):
    pytest.importorskip("diffusers")
    sizes = {"layers": 2, "heads": 2, "head_dim": 12, "text_len": 5, "text_dim": 8, "height": 64, "width": 64}
    steps = tuple(1 for _ in kind.row.steps)
    monkeypatch.setattr(kind, "row", replace(kind.row, **sizes, steps=steps, amplify_first=False))
    choice = ModelChoice.of(kind.row.name, device="cpu", random_weights=True)
    settings = VerifySettings(("a boat",), ("none", "recap"), seconds=2.75)
    record = write_verification(choice, settings, tmp_path / "out")
    assert record["passed"] and record["weights"] == "random"
    # A chunk is 33 pictures of 24 a second.
    assert [run["blocks"] for run in record["runs"]] == [2, 2]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "verify.json"}


def test_random_weights_of_helios_refuse_what_they_would_ignore():
    backbone = {"name": HeliosDistilledConfig.row.name, "offload": "group"}
    with pytest.raises(ValueError, match=r"backbone.offload is 'group': .*leave it out"):
        ModelChoice.of(backbone, device="cpu", random_weights=True)
    sized = backbone | {"offload": "auto", "height": 128, "width": 128}
    assert ModelChoice.of(sized, device="cpu", random_weights=True).config.backbone.settings.height == 128


@pytest.mark.slow
def test_it_runs_without_the_packages_of_the_command_line(tmp_path):
    """Several models in one process, in 8 bits, as on a machine with nothing but torch; a failure stops nobody."""
    absent = ("typer", "rich", "av", "diffusers", "ray", "fastapi")
    names = ["self-forcing", "untrained", "embedded"]
    words = [*names, "--out", str(tmp_path), "--memories", "sink", "--precision", "int8", *SHORT]
    program = (
        f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        f"from benchmarks.verify import main\nsys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "recap weights self-forcing" in done.stdout, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"verify-untrained", "verify-embedded"}
    for name in names[1:]:
        folder = tmp_path / f"verify-{name}"
        assert {path.name for path in folder.iterdir()} == {"index.html", "verify.json"}
        record = json.loads((folder / "verify.json").read_text())
        assert record["passed"] and record["precision"] == "int8"
        assert "PyAV is not installed" in (folder / "index.html").read_text()
    assert "PyAV is not installed" in done.stdout and "2 of 2" not in done.stdout


@pytest.mark.slow
def test_a_failed_check_is_said_and_is_the_exit_code(recap, monkeypatch):
    monkeypatch.setattr("recap.show.verification.LEAST", {**LEAST, "contrast": 0.9})
    code, output, _ = recap(
        "verify", "embedded", "--prompt", "a fox on a beach by day", "--memories", "none", *SHORT
    )
    assert code == 1 and "contrast: 0.1" in output and "FAILED, 5 of 6 checks passed" in output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nosuch",), "nosuch"),
        (("untrained", "--memories", "none,none"), "--memories"),
        (("untrained", "--memories", "none,nosuch"), "nosuch"),
        (("untrained", "--seconds", "0"), "seconds"),
        (("untrained", "--random-weights"), "--random-weights"),
        (("untrained", "--set", "memory.reinforcement=2"), "--set"),
        (("untrained", "--precision", "fp4"), "precision is 'fp4': no such name"),
        (("untrained", "--precision", ""), "known: fp8, full, int8"),
        (("untrained", "--low-memory", "maybe"), "low_memory is 'maybe': no such name"),
        (("untrained", "--dtype", "int8"), "dtype is 'int8': no such name"),
        (("helios-distilled", "--precision", "int8"), "only the models of the Wan family"),
        (("self-forcing", "--random-weights", "--decoder", "small"), "backbone.decoder is 'small'"),
        (("self-forcing", "--random-weights", "--eager"), "the readable full decoder needs its weight files"),
        (("self-forcing", "--seconds", "2"), "recap weights self-forcing"),
    ],
)
def test_what_cannot_be_verified_is_refused_in_one_line(recap, words, named):
    code, _, error = recap("verify", *words, "--device", "cpu")
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and named in lines[0]


def test_overheads_are_medians_relative_to_the_first_memory():
    runs = [
        {"memory": name, "block_ms": {"median": value}}
        for name, value in (("sink", 10.0), ("sink", 30.0), ("recap", 30.0), ("recap", 50.0))
    ]
    assert overheads(runs, ("sink", "recap")) == {"sink": 1.0, "recap": 2.0}
