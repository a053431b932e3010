from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_distill import teacher as teacher
from test_train_dit import SMALL, small_world

from training.records import load_weights
from training.reopen import Options, Trainer
from training.teacher_forcing import ClipBatch, Layout, predict_flow
from training.train_dit import TextAndFlow, load_model, save_model


@pytest.fixture(scope="module")
def former(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that differs from its teacher and shares its words."""
    folder = tmp_path_factory.mktemp("former")
    model = TextAndFlow(SMALL)
    load_model(model, teacher)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.dit.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_model(model, folder)
    return folder


def trainer_of(teacher: Path, former: Path, out: Path, **changes) -> Trainer:
    sizes = {"batch": 6, "blocks": 3, "longest": 5, "uses": 2, "num_captions": 24, "openings": 2}
    settings = {**sizes, "sample_blocks": 0, "compile": False, **changes}
    options = replace(Options(0.02, teacher, former, Path("none"), out, reserve_s=0.0), **settings)
    return Trainer(options, small_world, "cpu", SMALL)


def test_it_begins_as_the_former_model_and_errs_in_led_steps_alone(
    teacher: Path, former: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(teacher, former, tmp_path)
    trainer.clock.apply([trainer.optimiser])
    before = [p.detach().clone() for p in trainer.model.dit.parameters()]
    first, second, opening, later, norm = trainer.step(trainer.draws.next()[0]).tolist()
    assert first > 1e-6 and second > 1e-6 and norm > 0
    assert max(opening, later) < 1e-10, "blocks that stay are the former model's"
    assert any(
        not torch.equal(old, new) for old, new in zip(before, trainer.model.dit.parameters(), strict=True)
    )


def test_led_steps_come_to_end_where_the_teacher_does(teacher: Path, former: Path, tmp_path: Path) -> None:
    """Where prompts and noise are the same, the error of led steps falls; teacher and former stay as they are."""
    trainer = trainer_of(teacher, former, tmp_path, rate=2e-3, warmup_s=0.0, minutes=60.0)
    models = (trainer.teacher, trainer.former)
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    drawn = trainer.draws.next()[0]
    trainer.clock.apply([trainer.optimiser])
    opened = trainer.open(drawn.text[:, 0].repeat_interleave(trainer.options.openings, dim=0))
    trainer.open = lambda text: opened
    drawn = drawn._replace(text=drawn.text[:, :1].expand_as(drawn.text))
    led = torch.stack([trainer.step(drawn)[:2] for _ in range(8)])
    assert (led[-1] < 0.7 * led[0]).all()
    for kept, model in zip(before, models, strict=True):
        assert all(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_lead_is_the_teachers_path_in_small_steps(
    teacher: Path, former: Path, tmp_path: Path, guidance: float
) -> None:
    trainer = trainer_of(teacher, former, tmp_path, guidance=guidance)
    text = trainer.draws.next()[0].text[:, 0]
    openings = trainer.open(text)
    lead = trainer.lead(openings, text)
    # By one pass of a clip with one block, as in flow matching, instead of the backbone's sampler.
    for step in range(2):
        x = openings[:, step : step + 1]
        sigmas = [sigma for sigma in (*trainer.grid, 0.0) if sigma <= float(trainer.sigmas[step]) + 1e-6]
        assert abs(sigmas[0] - float(trainer.sigmas[step])) < 1e-6, "a step of the model lies on the grid"
        for sigma, following in pairwise(sigmas):
            flow = flow_of(trainer.teacher, trainer, text[:, None], x, sigma)
            if guidance != 1:
                no_text = trainer.euler.no_text.expand(len(x), -1, -1)[:, None]
                flow = torch.lerp(flow_of(trainer.teacher, trainer, no_text, x, sigma), flow, guidance)
            x = x + (following - sigma) * flow
        torch.testing.assert_close(lead[:, step], x[:, 0], atol=1e-4, rtol=1e-4)


def test_openings_are_new_and_the_models_own(
    teacher: Path, former: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(teacher, former, tmp_path)
    text = trainer.draws.next()[0].text[:, 0]
    first, again = trainer.open(text), trainer.open(text)
    assert first.shape[1] == 2 and not torch.equal(first[:, 0], again[:, 0])
    # Without new noise the second input is (1 - sigma) of the model's estimate from the first.
    monkeypatch.setattr("training.reopen.renoise", lambda clean, noise, sigma: (1 - sigma) * clean)
    noise, second = trainer.open(text).unbind(1)
    one, following = trainer.sigmas[:2].tolist()
    estimate = noise - one * flow_of(trainer.model, trainer, text[:, None], noise[:, None], one)[:, 0]
    torch.testing.assert_close(second, (1 - following) * estimate, atol=1e-4, rtol=1e-4)


def flow_of(
    model: TextAndFlow, trainer: Trainer, text: torch.Tensor, x: torch.Tensor, sigma: float
) -> torch.Tensor:
    level = torch.full(x.shape[:2], sigma)
    batch = ClipBatch(x, x, level, x[:, :0], level[:, :0], text, text[:, :0], x.new_zeros(len(x), 6))
    return predict_flow(model.dit, batch, (Layout(len(x)),), trainer.turns)


def test_halved_passes_do_the_same_in_bf16(teacher: Path, former: Path, tmp_path: Path) -> None:
    whole = trainer_of(teacher, former, tmp_path)
    half = trainer_of(teacher, former, tmp_path, half=True, warmup_s=0.0)
    text = whole.draws.next()[0].text[:, 0]
    openings = whole.open(text)
    torch.testing.assert_close(half.lead(openings, text), whole.lead(openings, text), atol=0.1, rtol=0.1)
    half.clock.apply([half.optimiser])
    assert half.step(half.draws.next()[0]).isfinite().all()
    for ours, theirs in zip(half.runner.parameters(), half.model.dit.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), "the next rollout is of the model as it is now"


def test_a_run_writes_what_the_next_one_resumes_from(teacher: Path, former: Path, tmp_path: Path) -> None:
    trainer = trainer_of(teacher, former, tmp_path)
    trainer.run()
    begun, saved = (load_weights(folder / "dit.safetensors") for folder in (former, tmp_path))
    resumed = trainer_of(teacher, former, tmp_path / "next", resume=tmp_path)
    for model, weights in ((resumed.model, saved), (resumed.former, begun)):
        assert all(torch.equal(value, weights[name]) for name, value in model.dit.state_dict().items())


def test_a_teacher_with_other_words_is_refused(teacher: Path, former: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    save_model(TextAndFlow(SMALL), tmp_path / "other")
    with pytest.raises(ValueError, match="--teacher"):
        trainer_of(tmp_path / "other", former, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"led": 0},
        {"led": 4},
        {"euler_steps": 6},
        {"euler_steps": 0},
        {"blocks": 1},
        {"openings": 0},
        {"batch": 0},
        {"led_weight": math.nan},
        {"guidance": math.inf},
        {"rate": 0.0},
    ],
)
def test_settings_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        Options(1.0, Path("teacher"), Path("former"), Path("autoencoder"), Path("out"), **wrong)
