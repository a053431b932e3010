from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import pytest
import torch
from fake_world import SquaresWorld
from safetensors.torch import load_file

from recap.backbones.tiny.autoencoder import EMBEDDED_AUTOENCODER, Autoencoder
from training.train_autoencoder import Options, Trainer, decibels, latent_loss, reconstruction_loss

SMALL = replace(EMBEDDED_AUTOENCODER, widths=(8, 16, 24), depths=(1, 1, 1), remembered=(8, 12))


def options(out: Path, seconds: float, **changes) -> Options:
    sizes = {"batch": 4, "piece_frames": 2, "whole_batch": 2, "pool": 16, "fresh": 2, "eval_clips": 2}
    settings = {**sizes, "reserve_s": 0.0, "eval_every_s": 1e9}
    return replace(Options(seconds / 60, out), **{**settings, **changes})


def test_the_loss_falls_on_a_repeated_clip(tmp_path: Path) -> None:
    squares = SquaresWorld()
    trainer = Trainer(options(tmp_path, 600), lambda count, seed: squares(count, 5), "cpu", SMALL)
    trainer.clock.apply(trainer.optimisers)
    losses = [trainer.step(index)[0].item() for index in range(100)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_everything_is_written(tmp_path: Path) -> None:
    psnr = Trainer(options(tmp_path, 1), SquaresWorld(), "cpu", SMALL).run()
    record = json.loads((tmp_path / "record.json").read_text())
    trained = [line for line in record["lines"] if line["event"] == "train"]
    assert trained[-1]["steps"] > 1 and psnr == pytest.approx(record["lines"][-1]["psnr"], rel=1e-3)
    assert record["settings"]["spec"]["latent_channels"] == 16
    assert str(tmp_path.parent) not in (tmp_path / "record.json").read_text()
    assert cv2.imread(str(tmp_path / "autoencoder.png")).shape == (4 * 32, 9 * 48, 3)
    weights = load_file(tmp_path / "autoencoder.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    made = Autoencoder(SMALL)
    made.load_state_dict(weights)
    latents = made.encode(SquaresWorld()(4, 77).pixels)
    assert 0.3 < latents.std() < 3


def test_a_run_resumes_from_the_weights_of_another(tmp_path: Path) -> None:
    Trainer(options(tmp_path / "a", 1), SquaresWorld(), "cpu", SMALL).run()
    resumed = Trainer(options(tmp_path / "b", 1, resume=tmp_path / "a"), SquaresWorld(), "cpu", SMALL)
    saved = load_file(tmp_path / "a" / "autoencoder.safetensors")
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, saved[name].float())
    with pytest.raises(FileNotFoundError, match="no such weights"):
        Trainer(options(tmp_path / "c", 1, resume=tmp_path), SquaresWorld(), "cpu", SMALL)


def test_losses_of_equal_pictures_are_zero() -> None:
    pixels = torch.rand(2, 5, 3, 16, 16)
    loss, square = reconstruction_loss(pixels, pixels)
    assert square == 0 and loss < 2e-3
    assert decibels(torch.tensor(1e-3)) == pytest.approx(30)
    latents = torch.randn(4, 5, 16, 16, 16)
    assert latent_loss(latents) < 1e-2 < latent_loss(3 * latents)
