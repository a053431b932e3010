"""A studio that generates several sessions in one forward: the same videos, and turns for everybody."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("fastapi")

from recap.config import RunConfig
from recap.errors import RecapError
from recap.io.report import SILENT
from recap.run import generate
from recap.session import Session
from recap.session.batcher import Batcher, rows_at
from recap.studio import messages as say
from recap.studio.directing import make_branch
from recap.studio.engine import Engine
from recap.studio.messages import MAIN
from recap.studio.store import RECORD, StudioFolder
from recap.studio.studio import Studio
from tests.studio.conftest import PROMPT, wait_for
from tests.studio.test_keep import zipped
from tests.test_batcher import session_of

BLOCKS = 4


def test_sessions_and_videos_of_a_batch_are_what_each_generates_alone(settings, backbone):
    studio = Studio(replace(settings, batch=3, lead_blocks=BLOCKS))
    try:
        lives = [studio.create(say.NewSession(prompt=PROMPT, seed=seed)) for seed in range(3)]
        other = studio.create(say.NewSession(prompt=PROMPT, seed=3, second_memory="sink"))
        video = studio.create_video(say.NewVideo(prompt=PROMPT, seconds=2.0, seed=4))["id"]
        wait_for(lambda: all(live.store.count(MAIN, 0) >= BLOCKS for live in (*lives, other)), "blocks")
        wait_for(lambda: studio.videos.find(video).status == "completed", "the video")
        for live in (*lives, other):
            for track, plain in live.record.tracks.items():
                alone = Session(RunConfig.from_dict(plain), backbone=backbone, batcher=Batcher(3))
                found = live.store.read_latents(track, 0, range(BLOCKS))
                for block in range(BLOCKS):
                    assert torch.equal(alone.step().latents, found[block]), (track, block)
    finally:
        studio.close()


class Plays:
    """Wants so many blocks of a session, and notes when it got one."""

    def __init__(self, name, session, count, order):
        self.name, self.session, self.left, self.order = name, session, count, order

    def wants_block(self):
        return self.left > 0

    def make_block(self):
        yield self.session
        self.left -= 1
        self.order.append(self.name)

    def fail(self, error):
        raise error


def test_nobody_gets_a_second_block_before_everybody_got_one(backbone):
    batcher, order = Batcher(2), []
    engine = Engine(batcher)
    try:
        players = [Plays(n, session_of(backbone, n, batcher), 3, order) for n in range(5)]

        def begin():
            for player in players:
                engine.add(player)

        engine.call(begin).result()
        wait_for(lambda: not any(player.wants_block() for player in players), "blocks")
        for end in range(len(order)):
            counts = Counter(order[: end + 1])
            assert max(counts.values()) - min(counts[n] for n in range(5)) <= 1, order
    finally:
        engine.close()


def test_what_fails_in_one_session_does_not_stop_the_others(backbone):
    batcher, order, failed = Batcher(2), [], []
    engine = Engine(batcher)

    class Breaks(Plays):
        def make_block(self):
            yield self.session
            raise ValueError("after its block")

        def fail(self, error):
            self.left = 0
            failed.append(error)

    try:
        players = [Breaks(0, session_of(backbone, 0, batcher), 3, order)]
        players.append(Plays(1, session_of(backbone, 1, batcher), 3, order))
        engine.call(lambda: [engine.add(player) for player in players]).result()
        wait_for(lambda: not any(player.wants_block() for player in players), "blocks")
        assert order == [1, 1, 1] and len(failed) == 1
    finally:
        engine.close()


def played(studio, name, blocks):
    """Play a session to so many blocks, and close it."""
    live = studio.open(name)
    studio.engine.call(live.play).result()
    wait_for(lambda: live.see(1e6) or live.store.count(MAIN, live.record.current) >= blocks, "blocks")
    told = studio.engine.call(lambda: (live.pause(), live.status())[1]).result()
    studio.close_session(name)
    return told


def expected_of(record, branch, backbone, count):
    """What a plain session generates that gets as many rows at every block as the record says."""
    own = record.branches[branch]
    session = Session(RunConfig.from_dict(record.tracks[MAIN]), backbone=backbone)
    session.restore(replace(session.snapshot(), cues=dict(own.cues)))
    made = []
    for block in range(count):
        session.batcher = Batcher(rows_at(own.rows, block))
        made.append(session.step().latents)
    return made


def test_a_session_that_moves_to_another_batch_is_still_what_its_record_says(settings, backbone, caplog):
    name, notes = "", []
    for batch, blocks in ((3, 3), (3, 4), (4, 6), (1, 8)):
        studio = Studio(replace(settings, batch=batch))
        try:
            if not name:
                name = studio.create(say.NewSession(prompt=PROMPT)).record.id
            caplog.clear()
            live = studio.open(name)
            notes.append((live.status()["message"], caplog.text))
            rows = dict(live.branch.rows)
            if batch == 4:
                # Its branch begins in three rows, and goes on in four.
                number = studio.engine.call(partial(make_branch, live, 0.8)).result()
                forked = live.record.branches[number].rows
            played(studio, name, blocks)
            found = studio.folder.load(name)
        finally:
            studio.close()
        for state in found.folder.rglob("state-*"):
            # As after a kill: its memory has to be made again from latents.
            state.unlink()
    first, same, other, last = notes
    assert first == same == ("", "")
    assert "--batch 3" in other[0] and "it is 4" in other[0] and other[0] in other[1]
    assert "--batch 4" in last[0] and "it is 1" in last[0]
    assert forked == {0: 3, 2: 4} and rows[0] == 3 and rows[max(rows)] == 1
    for branch in found.record.branches:
        count = found.count(MAIN, branch)
        known = found.read_latents(MAIN, branch, range(count))
        for block, latents in enumerate(expected_of(found.record, branch, backbone, count)):
            assert torch.equal(latents, known[block]), (branch, block, found.record.branches[branch].rows)


@pytest.fixture
def kept(settings):
    """A closed session of three blocks; returns its name and its record's file."""
    studio = Studio(settings)
    try:
        name = studio.create(say.NewSession(prompt=PROMPT)).record.id
        played(studio, name, 3)
    finally:
        studio.close()
    return name, settings.folder / "sessions" / name / RECORD


def test_a_record_without_a_note_is_of_one_row(settings, kept):
    name, path = kept
    plain = json.loads(path.read_bytes())
    assert plain["branches"][0].pop("batch") == []
    path.write_text(json.dumps(plain))
    for batch, expected in ((1, []), (3, [3])):
        studio = Studio(replace(settings, batch=batch))
        try:
            live = studio.open(name)
            assert list(live.branch.rows.values()) == expected
            assert bool(live.message) == (batch > 1)
            shown = live.summary()["branches"][0]["batch"]
            assert shown == [{"block": live.next_block, "rows": 3}] * (batch > 1)
        finally:
            studio.close()


IMPOSSIBLE = [
    *([{"block": 0, "rows": rows}] for rows in (0, -1, 65, 2.5, True, "4", None, [2], 10**400)),
    *([{"block": block, "rows": 2}] for block in (-1, 1.5, True, "0", None, [0])),
    *(None, 3, "x", {"0": 3}, [3], [[0, 3]], [{"block": 0}], [{"rows": 3}]),
]


def test_a_record_with_an_impossible_batch_is_damaged(settings, kept):
    name, path = kept
    plain = json.loads(path.read_bytes())
    folder = StudioFolder(settings.folder, 2**30)
    for noted in IMPOSSIBLE:
        plain["branches"][0]["batch"] = noted
        path.write_text(json.dumps(plain))
        with pytest.raises(RecapError, match=f"session is .*{name}.* its record is damaged.*delete the"):
            folder.load(name)


def test_an_uploaded_run_was_generated_in_one_row(settings, tmp_path):
    config = RunConfig.from_dict(
        {"backbone": "untrained", "flow": "classical", "shots": [{"prompt": PROMPT, "seconds": 2.0}]}
    )
    generate(config, tmp_path / "run", reporter=SILENT)
    studio = Studio(replace(settings, batch=3))
    try:
        live = studio.upload(zipped(tmp_path / "run"))
        assert live.branch.rows == {3: 3} and "--batch 1" in live.message
        wait_for(lambda: live.store.count(MAIN, 0) > 3, "blocks")
        assert live.tracks[MAIN].session.snapshot().rows == {3: 3}
    finally:
        studio.close()
