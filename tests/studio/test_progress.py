"""Commands that come while blocks are still being encoded: a record stays true, and nothing gets lost on its way.

The encoder waits here until a test lets it go on; on a busy machine it does so by itself. A drop used to throw away
every block that was on its way, earlier ones too: the branch then ended at the gap, and a pin that the record had
behind it was made at another block. It was seen as one of ten random sessions that was not repeated bit for bit.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from recap.errors import RecapError
from recap.io.report import SILENT
from recap.run import generate
from recap.studio import messages as say
from recap.studio.progress import BranchProgress
from recap.studio.track import Track
from tests.studio.conftest import PROMPT, order, play_to, wait_for
from tests.studio.test_keep import config_of, zipped
from tests.studio.test_random import repeat


@contextmanager
def encoder_held(studio):
    """Keep the encoder busy until the end of the block."""
    go = threading.Event()
    studio.engine.encoder.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def check_branches(live, backbone):
    for branch in live.record.branches:
        blocks = range(live.store.count("main", branch))
        known = live.store.read_latents("main", branch, blocks)
        for block, latents in repeat(live, branch, backbone):
            assert torch.equal(known[block], latents), (branch, block)


def play_two_blocks(client, studio, live):
    """See all that is on disk and let two more blocks be generated, which the encoder does not get to."""
    name, count = live.record.id, live.next_block
    order(client, name, "playhead", second=live.clock.start_s(count))
    assert live.first_unseen == live.store.count("main", 0) == count
    order(client, name, "play")
    wait_for(lambda: live.next_block == count + 2, "the lead")
    order(client, name, "pause")
    return count


def test_a_prompt_for_later_leaves_the_blocks_before_it_on_their_way(client, studio):
    live = studio.create(say.NewSession(prompt=PROMPT))
    play_to(client, studio, live.record.id, 2)
    with encoder_held(studio):
        count = play_two_blocks(client, studio, live)
        order(client, live.record.id, "prompt", text="two birds", at_s=live.clock.start_s(count + 1))
        assert live.next_block == count + 1 and live.store.count("main", 0) == count
    live.settle()
    assert live.store.count("main", 0) == count + 1


def test_what_is_not_on_disk_has_not_been_seen(client, studio, backbone):
    live = studio.create(say.NewSession(prompt=PROMPT))
    name = live.record.id
    play_to(client, studio, name, 2)
    with encoder_held(studio):
        count = play_two_blocks(client, studio, live)
        order(client, name, "playhead", second=live.clock.start_s(count + 2))
        assert live.first_unseen == count
        assert order(client, name, "forget", slots=[3])["block"] == count
    order(client, name, "play")
    play_to(client, studio, name, count + 3)
    check_branches(live, backbone)


def test_a_command_after_a_switch_goes_back_further_than_memory_does(client, studio, backbone):
    """A branch is built from its last state on disk, and what was unseen of it can begin before that."""
    live = studio.create(say.NewSession(prompt=PROMPT))
    name = live.record.id
    play_to(client, studio, name, 4)
    order(client, name, "forget", slots=[3])
    order(client, name, "play")
    wait_for(lambda: not live.wants_block(), "the lead")
    order(client, name, "pause")
    unseen = live.first_unseen
    order(client, name, "branch", second=0.1)
    order(client, name, "switch", branch=0)
    session = live.tracks["main"].session
    assert session.oldest_block > unseen == live.first_unseen
    kept = session.snapshot()
    with pytest.raises(RecapError, match="slots"):
        studio.command(live, say.ForgetMessage(slots=[10**6])).result()
    again = live.tracks["main"].session
    assert again.next_block == kept.block and again.snapshot().cues == kept.cues
    assert order(client, name, "pin", slots=[0], name="fox")["block"] == unseen
    order(client, name, "play")
    play_to(client, studio, name, unseen + 2)
    check_branches(live, backbone)


def test_a_run_that_is_being_read_is_not_changed(client, studio, backbone, tmp_path, monkeypatch):
    """The record would name a block behind the run, and the memory that is changed is one of its middle."""
    generate(config_of([(PROMPT, 3.0, False)]), tmp_path / "run", reporter=SILENT)
    go, step = threading.Event(), Track.step

    def gated(self, *given):
        go.wait()
        return step(self, *given)

    monkeypatch.setattr(Track, "step", gated)
    name = client.post("/v1/sessions/upload-run", content=zipped(tmp_path / "run")).json()["session"]
    live = studio.sessions[name]
    paused = studio.command(live, say.PauseMessage())
    go.set()
    paused.result()
    assert live.next_block < 4
    for command in (
        say.ForgetMessage(slots=[0]),
        say.PromptMessage(text="two birds"),
        say.BranchMessage(second=0.1),
    ):
        with pytest.raises(RecapError, match="of 4 of the uploaded run is being read"):
            studio.command(live, command).result()
    order(client, name, "play")
    wait_for(lambda: live.first_unseen == 4, "the whole run")
    assert order(client, name, "forget", slots=[0])["block"] == 4
    play_to(client, studio, name, 6)
    check_branches(live, backbone)


def test_progress_counts_a_block_when_all_its_tracks_are_on_disk():
    progress = BranchProgress(("main", "second"))
    progress.begin(0, 2)
    assert progress.first_unseen(0) == 2
    first, second = ({"index": 2, "track": track} for track in ("main", "second"))
    progress.send(0, first)
    progress.arrive(0, first)
    progress.see(0, 9)
    assert progress.first_unseen(0) == 2
    progress.send(0, second)
    progress.arrive(0, second)
    progress.see(0, 9)
    assert progress.first_unseen(0) == 3


def test_progress_drops_what_is_on_its_way_from_a_block_on():
    progress = BranchProgress(("main",))
    progress.begin(0, 0)
    sent = [{"index": index, "track": "main"} for index in range(3)]
    for info in sent:
        progress.send(0, info)
    progress.drop(0, 1)
    assert [progress.is_wanted(0, info) for info in sent] == [True, False, False]
    again = {"index": 1, "track": "main"}
    progress.send(0, again)
    assert progress.is_wanted(0, again) and not progress.is_wanted(0, sent[1])
    progress.see(1, 5)
    progress.begin(1, 4)
    assert progress.first_unseen(1) == 4, "of a branch that is built for the first time all is seen"
