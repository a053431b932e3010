from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_distill import teacher as teacher
from test_distill import trainer_of

from training.distill import Trainer
from training.teacher_forcing import ClipBatch, Layout, predict_flow
from training.train_dit import TextAndFlow


@pytest.fixture
def trainer(teacher: Path, tmp_path: Path) -> Trainer:
    """One whose generator differs from its teacher."""
    made = trainer_of(teacher, tmp_path)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.generator.dit.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return made


def test_the_lead_is_the_teachers_path_in_small_steps(trainer: Trainer) -> None:
    text = trainer.draws.next()[0].text[:, 0]
    inputs, sigma, ends = trainer.leader.begin(trainer.runner, text)
    assert sigma.tolist() == trainer.sigmas[:2].tolist()
    # By one pass of a clip with one block, as in flow matching, instead of the backbone's sampler.
    for step in range(2):
        x = inputs[:, step : step + 1]
        levels = [level for level in (*trainer.leader._grid, 0.0) if level <= float(sigma[step]) + 1e-6]
        assert abs(levels[0] - float(sigma[step])) < 1e-6, "a step of the model lies on the grid"
        for level, following in pairwise(levels):
            x = x + (following - level) * flow_of(trainer.teacher, trainer, text[:, None], x, level)
        torch.testing.assert_close(ends[:, step], x[:, 0], atol=1e-4, rtol=1e-4)


def test_openings_are_new_and_the_models_own(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = trainer.draws.next()[0].text[:, 0]
    first, again = (trainer.leader.open(trainer.runner, text) for _ in range(2))
    assert first.shape[1] == 2 and not torch.equal(first[:, 0], again[:, 0])
    # Without new noise the second input is (1 - sigma) of the model's estimate from the first.
    monkeypatch.setattr("training.leading.renoise", lambda clean, noise, sigma: (1 - sigma) * clean)
    noise, second = trainer.leader.open(trainer.runner, text).unbind(1)
    one, following = trainer.sigmas[:2].tolist()
    estimate = noise - one * flow_of(trainer.generator, trainer, text[:, None], noise[:, None], one)[:, 0]
    torch.testing.assert_close(second, (1 - following) * estimate, atol=1e-4, rtol=1e-4)


def flow_of(
    model: TextAndFlow, trainer: Trainer, text: torch.Tensor, x: torch.Tensor, sigma: float
) -> torch.Tensor:
    level = torch.full(x.shape[:2], sigma)
    batch = ClipBatch(x, x, level, x[:, :0], level[:, :0], text, text[:, :0], x.new_zeros(len(x), 6))
    return predict_flow(model.dit, batch, (Layout(len(x)),), trainer.turns)
