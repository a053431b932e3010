"""The studio's page works against a cluster as it is: it plays, is directed, and plays on after a kill."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from recap.studio.cluster.settings import ClusterSettings
from tests.studio.clusters import Processes, kill, serving
from tests.studio.test_studio_page import LOOK, begin, browser, cues, direct, opened, wait_second

__all__ = ["browser"]


@pytest.mark.slow
def test_the_page_plays_on_when_its_replica_is_killed(browser, tmp_path):
    settings = ClusterSettings(str(tmp_path / "store"), "untrained", "classical", replicas=2, sessions=3)
    seating = Processes(settings.store, 2, settings.sessions, settings.queue)
    try:
        with serving(settings, seating) as (front, address), opened(browser, f"{address}/") as page:
            begin(page)
            wait_second(page, 2.0)
            (seat,) = front.directory.sessions.values()
            kill(seating.processes[seating.addresses.index(seat.address)].pid)
            second = page.evaluate(LOOK)["second"]
            wait_second(page, second + 4.0)
            print(f"the page's session was back after {front.pauses[0]:.2f} s")
            assert direct(page, "two birds") > 0
            assert cues(page) == ["a red boat", "two birds"]
            assert front.directory.moves == 1
    finally:
        seating.close()
