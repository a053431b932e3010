"""A long session does not grow: not in memory, not in threads, not in open files."""

from __future__ import annotations

import threading

import pytest

from recap.studio.messages import NewSession, PlayheadMessage
from tests.studio.conftest import PROMPT, Viewer, order, wait_for, watch
from tests.studio.test_guard import open_files, resident_bytes


def play(studio, live, viewer, blocks):
    """Watch until so many blocks are there; the viewer reads its stream to the end."""
    while live.next_block < blocks:
        studio.command(live, PlayheadMessage(second=live.clock.start_s(max(0, live.next_block - 1)))).result()
    wait_for(lambda: live.store.count("main", 0) >= blocks, "blocks", 60)
    while not any(e["type"] == "block" and e["index"] >= blocks - 2 for e in viewer.events[-20:]):
        viewer.read()
    viewer.events[1:], viewer.media[:] = viewer.events[-20:], []


@pytest.mark.slow
def test_twenty_minutes_of_video_do_not_grow(client, studio):
    live = studio.create(NewSession(prompt=PROMPT))
    with watch(client, live.record.id) as socket:
        viewer = Viewer(socket)
        viewer.read()
        play(studio, live, viewer, 400)
        order(client, live.record.id, "prompt", text="two birds")
        before, handles, threads = resident_bytes(), open_files(), threading.active_count()
        for blocks in range(500, 1601, 100):
            play(studio, live, viewer, blocks)
        grown = resident_bytes() / before - 1
        print(f"1200 blocks (15 minutes of video): resident memory grew by {100 * grown:.2f} %")
        assert grown < 0.05
        assert open_files() <= handles + 2 and threading.active_count() <= threads + 1
