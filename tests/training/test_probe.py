"""The probe learns, and its results have the right shapes."""

from __future__ import annotations

import pytest
import torch

from recap.backbones.tiny.vocabulary import ACTORS
from recap.eval.judges.probe import CELL, NOBODY, Probe
from training.probe import UNSURE, degrade, labels_of, probe_loss
from training.script import ActorScript, Script

CAST = ("fox", "bus")


@pytest.fixture(scope="module")
def clips(world):
    scripts = [Script("snow", actors=(ActorScript(kind, size=70),)) for kind in CAST]
    return world.film(scripts, seed=4, num_pictures=1)


def test_labels_are_at_the_actor(clips):
    labels = labels_of(clips)
    assert labels.cells.shape == (2, 8, 13) and labels.presence.shape == (2, len(ACTORS))
    for row, kind in enumerate(CAST):
        cells = labels.cells[row]
        assert set(cells.unique().tolist()) <= {ACTORS.index(kind), NOBODY, UNSURE}
        y, x = (cells == ACTORS.index(kind)).nonzero()[0].tolist()
        assert (clips.instances[row, 0, y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL] == 1).any()
        torch.testing.assert_close(labels.colours[row, y, x], clips.colours[row, 0])
        assert labels.presence[row].nonzero().flatten().tolist() == [ACTORS.index(kind)]


def test_the_probe_learns_a_few_pictures(clips):
    torch.manual_seed(0)
    probe = Probe((16, 24, 32, 48))
    labels, pictures = labels_of(clips), clips.pictures.flatten(0, 1)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=4e-3)
    losses = []
    for _ in range(110):
        loss = probe_loss(probe(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]
    judged = probe.judge(clips.pictures)
    fox, cells = judged.actor_colour("fox")
    assert (cells[:1] > 3).all() and (cells[1:] == 0).all()
    assert fox[1:].isnan().all()
    torch.testing.assert_close(fox[0, 0], clips.colours[0, 0], atol=0.12, rtol=0)
    assert (judged.presence[:, 0, ACTORS.index("fox")] > 0.5).tolist() == [True, False]


def test_degraded_pictures_keep_their_mean(clips):
    pictures = clips.pictures.flatten(0, 1)
    worse = degrade(pictures)
    assert worse.shape == pictures.shape and worse.min() >= 0 and worse.max() <= 1
    torch.testing.assert_close(worse.mean((2, 3)), pictures.mean((2, 3)), atol=0.01, rtol=0)
