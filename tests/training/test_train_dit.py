from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_world import SquaresWorld
from torch import Tensor

from recap.backbones.tiny.vocabulary import token_ids
from recap.backbones.wan.spec import EMBEDDED
from training.clips import Clips, LatentPool
from training.optimisers import Muon, RunningMean, orthogonal
from training.records import load_weights, save_weights
from training.train_dit import (
    Options,
    TextAndFlow,
    Trainer,
    actor_weights,
    bank_scores,
    draw_sigma,
    load_model,
    save_model,
)

SMALL = replace(EMBEDDED, dim=48, heads=2, layers=2, ffn_dim=96, freq_dim=16, text_dim=8, latent_size=(4, 6))


def fold(pixels: Tensor) -> Tensor:
    """Encode without weights: blurred colours, each repeated."""
    frames = torch.nn.functional.avg_pool2d(pixels[:, ::4].flatten(0, 1), 8).unflatten(0, (len(pixels), -1))
    return (frames.repeat(1, 1, 6, 1, 1)[:, :, :16] - 0.5) * 3


def small_world(count: int, seed: int) -> Clips:
    return SquaresWorld(num_pictures=33, words=5)(count, seed % 2)


def options(out: Path, seconds: float, **changes) -> Options:
    settings = {
        "batch": 12, "pool": 24, "start_pool": 12, "eval_clips": 12, "warmup_s": 0.2, "reserve_s": 0.0,
        "eval_every_s": 1e9, "sample_blocks": 0, "compile": False, "muon_rate": 1e-2, "adam_rate": 5e-3,
    }  # fmt: skip
    return replace(Options(seconds / 60, Path("none"), out), **{**settings, **changes})


def test_the_loss_falls_on_few_clips(tmp_path: Path) -> None:
    trainer = Trainer(options(tmp_path, 600), small_world, fold, "cpu", SMALL)
    trainer.clock.apply(trainer.optimisers)
    losses = [trainer.step().mean().item() for _ in range(40)]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_everything_is_written_and_resumes(tmp_path: Path) -> None:
    first = Trainer(options(tmp_path / "a", 1), small_world, fold, "cpu", SMALL)
    loss = first.run()
    record = json.loads((tmp_path / "a" / "record.json").read_text())
    assert record["lines"][-1]["loss"] == pytest.approx(loss, rel=1e-3)
    resumed = Trainer(options(tmp_path / "b", 1, resume=tmp_path / "a"), small_world, fold, "cpu", SMALL)
    saved = load_weights(tmp_path / "a" / "dit.safetensors")
    for name, tensor in resumed.model.dit.state_dict().items():
        assert torch.equal(tensor, saved[name])
    again = resumed.evaluate(samples=False)
    assert again == pytest.approx(loss, rel=0.02)
    load_model(first.model, tmp_path / "b")


def test_large_weights_are_split_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.records.PART_BYTES", 50)
    state = {name: torch.randn(10).half().float() for name in "abcde"}
    save_weights(tmp_path / "dit.safetensors", state)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"dit-{n}.safetensors" for n in (1, 2, 3)]
    joined = load_weights(tmp_path / "dit.safetensors")
    assert joined.keys() == state.keys() and all(torch.equal(joined[n], state[n]) for n in state)


def test_noise_levels_and_scores() -> None:
    sigma = draw_sigma(4000, shift=3.0, device="cpu")
    assert sigma.min() > 0 and sigma.max() < 1 and 0.65 < sigma.median() < 0.85
    novelty = torch.zeros(64, 3, 2, 3)
    novelty[:, 1, 0, 0] = 1.0
    best = bank_scores(novelty).argmax(dim=1) == 6
    assert 0.4 < best.float().mean() < 0.9


def test_actors_weigh_more_with_less_noise() -> None:
    actors = torch.zeros(1, 2, 1, 2, 3)
    actors[..., 0, 0] = 1.0
    weight = actor_weights(actors, torch.tensor([[0.0, 1.0]]), most=4.0)
    assert weight.shape == (1, 2, 1, 1, 4, 6) and weight.mean().item() == pytest.approx(1)
    clear, noisy = weight[0, :, 0, 0]
    assert (clear[:2, :2] / clear[2:, 2:].min() == 5).all() and (noisy == noisy[0, 0]).all()


def test_a_pool_returns_rendered_clips() -> None:
    pool = LatentPool(small_world, fold, capacity=8, fresh=4, every=2, seed=0)
    pool.fill(8)
    drawn = pool.draw(16)
    assert drawn.latents.shape == (16, 9, 16, 4, 6) and drawn.words.shape == (16, 3, 5)
    rendered = torch.cat([fold(small_world(4, seed).pixels) for seed in (0, 1)]).bfloat16().float()
    assert all(any(torch.equal(row, clip) for clip in rendered) for row in drawn.latents)


def test_orthogonal_updates_and_running_means() -> None:
    made = orthogonal(torch.randn(3, 20, 8))
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5 and values.max() < 1.4
    layer = torch.nn.Linear(4, 4)
    mean = RunningMean(layer, 0.5)
    optimiser = Muon([layer.weight], lr=0.1)
    before = layer.weight.detach().clone()
    layer(torch.randn(8, 4)).square().mean().backward()
    optimiser.step()
    mean.update()
    after = layer.weight.detach().clone()
    mean.swap()
    torch.testing.assert_close(layer.weight.detach(), before.lerp(after, 1 - 2 / 11))
    mean.swap()
    assert torch.equal(layer.weight, after)


def test_half_of_the_extra_openings_name_two_actors() -> None:
    fox, bus = (token_ids(text) for text in ("a fox on a beach", "a bus on a beach"))
    both, none = token_ids("a bus and a fox on a beach", as_named=True), token_ids("an empty beach")

    def one_in_six(count: int, seed: int) -> Clips:
        clips = small_world(count, seed)
        captions = torch.tensor([both, fox, bus, none, fox, bus] * (count // 6))
        return replace(clips, words=captions[:, None].expand(-1, clips.words.shape[1], -1))

    pool = LatentPool(one_in_six, fold, capacity=12, fresh=12, every=1, seed=0)
    drawn = pool.openings(800).words[:, 0].tolist()
    assert sum(words == both for words in drawn) == 400
    assert sum(words == none for words in drawn) < 0.35 * sum(words in (fox, bus) for words in drawn) / 2


def test_a_run_writes_few_files_below_the_size_limit(tmp_path: Path) -> None:
    save_model(TextAndFlow(EMBEDDED), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["dit-1.safetensors", "dit-2.safetensors", "text.safetensors"]
    assert max(file.stat().st_size for file in files) < 16 * 2**20


@pytest.mark.parametrize("bank_rows", [False, True])
def test_banks_are_trained_only_on_request(tmp_path: Path, bank_rows: bool) -> None:
    trainer = Trainer(options(tmp_path, 600, bank_rows=bank_rows), small_world, fold, "cpu", SMALL)
    assert any(layout.bank for layout in trainer.layouts) is bank_rows
    assert trainer.step().isfinite().all()
