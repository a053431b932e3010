"""The simulation of viewers agrees with what queueing theory and arithmetic know."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.capacity import Setting, Simulation

CALM = Setting(prompt_s=math.inf, jitter=0.0, after_s=0.0, open_s=0.0, seconds=2000.0)


def erlang_b(offered, seats):
    """The part of calls that is lost when nobody waits (Erlang 1917)."""
    lost = 1.0
    for seat in range(1, seats + 1):
        lost = offered * lost / (seat + offered * lost)
    return lost


@pytest.mark.parametrize(("sessions", "playing"), [(1, 1.0), (2, 1.0), (3, 0.75 / 0.93), (4, 0.75 / 1.24)])
def test_a_full_replica_plays_as_many_as_its_block_time_allows(sessions, playing):
    found = Simulation(replace(CALM, sessions=sessions)).run()
    assert found["playing"] == pytest.approx(playing, abs=0.01)
    assert found["blocks_per_s"] == pytest.approx(min(sessions / 0.75, 1 / 0.31), rel=0.01)
    assert found["pauses"] == 0


@pytest.mark.parametrize(("replicas", "sessions"), [(1, 2), (4, 2), (3, 5)])
def test_without_a_queue_the_refused_are_those_of_erlangs_formula(replicas, sessions):
    seats = replicas * sessions
    setting = replace(CALM, replicas=replicas, sessions=sessions, queue=0, arrivals=seats / 60, stay_s=60.0,
                      block_s=0.05, seconds=60_000.0, play_s=5.0)  # fmt: skip
    found = Simulation(setting).run()
    assert found["refused"] == pytest.approx(erlang_b(seats, seats), abs=0.015)


def test_sessions_of_a_failed_replica_move_and_nobody_is_lost():
    setting = replace(CALM, replicas=3, sessions=2, block_s=0.1, failure_s=200.0, back_s=20.0, open_s=0.5)
    simulation = Simulation(setting)
    found = simulation.run()
    assert found["pauses"] > 5 and found["longest_pause_s"] >= found["pause_s"] >= 0.5
    assert all(viewer.arrived > 1000 for viewer in simulation.viewers) and found["viewers"] == 6
    seated = [viewer for one in simulation._replicas for viewer in (*one.turn, *one.opening)]
    assert len(seated) + len(simulation._moving) == 6 and len({id(v) for v in seated}) == len(seated)


def test_a_prompt_waits_for_the_turn_of_others_and_its_own_block():
    alone = Simulation(replace(CALM, sessions=1, prompt_s=10.0)).run()
    assert 0.31 <= alone["prompt_s"] <= alone["prompt_95_s"] <= 0.63
    other = Simulation(replace(CALM, sessions=2, prompt_s=10.0)).run()
    assert alone["prompt_95_s"] < other["prompt_95_s"] <= 3 * 0.31 + 0.01
