"""A studio that generates several sessions in one forward: the same videos, and turns for everybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("fastapi")

from recap.config import RunConfig
from recap.session import Session
from recap.session.company import Company
from recap.studio import messages as say
from recap.studio.engine import Engine
from recap.studio.messages import MAIN
from recap.studio.studio import Studio
from tests.studio.conftest import PROMPT, wait_for
from tests.test_company import session_of

BLOCKS = 4


def test_sessions_and_videos_of_a_batch_are_what_each_generates_alone(settings, backbone):
    studio = Studio(replace(settings, batch=3, lead_blocks=BLOCKS))
    try:
        lives = [studio.create(say.NewSession(prompt=PROMPT, seed=seed)) for seed in range(3)]
        beside = studio.create(say.NewSession(prompt=PROMPT, seed=3, beside="sink"))
        video = studio.create_video(say.NewVideo(prompt=PROMPT, seconds=2.0, seed=4))["id"]
        wait_for(lambda: all(live.store.count(MAIN, 0) >= BLOCKS for live in (*lives, beside)), "blocks")
        wait_for(lambda: studio.videos.find(video).status == "completed", "the video")
        for live in (*lives, beside):
            for track, plain in live.record.tracks.items():
                alone = Session(RunConfig.from_dict(plain), backbone=backbone, company=Company(3))
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
    company, order = Company(2), []
    engine = Engine(company)
    try:
        players = [Plays(n, session_of(backbone, n, company), 3, order) for n in range(5)]

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
    company, order, failed = Company(2), [], []
    engine = Engine(company)

    class Breaks(Plays):
        def make_block(self):
            yield self.session
            raise ValueError("after its block")

        def fail(self, error):
            self.left = 0
            failed.append(error)

    try:
        players = [Breaks(0, session_of(backbone, 0, company), 3, order)]
        players.append(Plays(1, session_of(backbone, 1, company), 3, order))
        engine.call(lambda: [engine.add(player) for player in players]).result()
        wait_for(lambda: not any(player.wants_block() for player in players), "blocks")
        assert order == [1, 1, 1] and len(failed) == 1
    finally:
        engine.close()
