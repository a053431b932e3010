"""Whatever is commanded, every branch on disk is what its record says: a plain session repeats it bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from recap.errors import RecapError
from recap.studio import messages as say
from recap.studio.track import apply_change
from tests.studio.conftest import PROMPT, twin

PROMPTS = ("two birds", "a blue house", "a red boat", "@fox and two birds")


def message(rng, live):
    """A command that makes sense more often than not."""
    count = max(1, live.next_block)
    second = live.clock.start_s(rng.randrange(count)) + 0.1
    block = rng.randrange(count)
    slots = [rng.randrange(24) for _ in range(rng.randrange(1, 3))]
    return rng.choice(
        [
            say.PlayheadMessage(second=second),
            say.PlayheadMessage(second=live.clock.start_s(count)),
            say.PlayheadMessage(second=live.clock.start_s(count)),
            say.PromptMessage(text=rng.choice(PROMPTS), cut=rng.random() < 0.3),
            say.PromptMessage(text=rng.choice(PROMPTS), reread=True),
            say.PromptMessage(text=rng.choice(PROMPTS), at_s=second + rng.random()),
            say.DropCueMessage(block=rng.choice([*live.branch.cues, block])),
            say.BranchMessage(second=second),
            say.SwitchMessage(branch=rng.choice(list(live.record.branches))),
            say.PinMessage(slots=slots, name=rng.choice(["fox", "bus"]), block=rng.choice([None, block])),
            say.ForgetMessage(slots=slots, block=rng.choice([None, block])),
            say.SetMessage(reinforcement=rng.choice([1.0, 2.0, 5.0])),
            say.SetMessage(capacity_frames=rng.choice([0.5, 1.0, 2.0])),
            say.DropCastMessage(name=rng.choice(["fox", "bus"])),
        ]
    )


def repeat(live, branch, backbone):
    """Generate a branch again from its record alone."""
    record = live.record.branches[branch]
    session = twin(live, backbone)
    session._cues = dict(record.cues)
    for block in range(live.store.count("main", branch)):
        for change in record.changes:
            if change["at"] == block:
                apply_change(session, live.store.folder, change)
        yield block, session.step().latents


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_every_branch_is_what_its_record_says(studio, backbone, seed):
    rng = random.Random(seed)
    live = studio.create(say.NewSession(prompt=PROMPT))
    name, done = live.record.id, 0
    for number in range(60):
        try:
            studio.command(live, message(rng, live)).result()
            done += 1
        except RecapError:
            # What does not make sense is refused, and must change nothing.
            pass
        assert live.status()["state"] != "failed", live.message
        if number % 20 == 19:
            studio.close_session(name)
            live = studio.open(name)
    studio.close_session(name)
    assert done > 20
    for branch in live.record.branches:
        known = live.store.read_latents("main", branch, range(live.store.count("main", branch)))
        for block, latents in repeat(live, branch, backbone):
            assert torch.equal(known[block], latents), (branch, block)
