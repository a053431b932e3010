"""A session can go back to any second and continue there in a branch; all branches stay on disk, one is generated."""

from __future__ import annotations

from collections.abc import Callable

from recap.errors import refuse
from recap.session.batcher import note_rows, rows_at
from recap.studio.engine import as_refusal
from recap.studio.live import LiveSession
from recap.studio.store import BranchRecord
from recap.studio.track import Track


def make_branch(live: LiveSession, second: float) -> int:
    """Go back to a second and continue from there in a new branch; returns its number."""
    live.check_sound()
    most = live.settings.limits.branches
    if len(live.record.branches) >= most:
        raise refuse("branches", len(live.record.branches), f"at most {most} are kept", "begin a session")
    live.settle()
    here = live.record.current
    block = min(live.clock.block_at(min(max(second, 0.0), 1e6)) + 1, live.next_block)
    if not block:
        raise refuse("second", second, "nothing is generated yet", "wait for the first block")
    parent = live.branch
    number = max(live.record.branches) + 1
    cues = {at: cue for at, cue in parent.cues.items() if at < block}
    changes = [change for change in parent.changes if change["at"] < block]
    for track in live.tracks.values():
        track.keep_state(here)
    with live.lock:
        rows = note_rows(parent.rows, block, rows_at(parent.rows, live.next_block))
        live.record.branches[number] = BranchRecord(number, here, block, cues, changes, parent.rule, rows)
        live.record.current = number
        live.store.save_record()
        live.progress.begin(number, block)
        _see_all_before(live, number)
    _move(live, lambda track: track.branch_off(block, live.branch))
    return number


def _see_all_before(live: LiveSession, branch: int) -> None:
    """Mark what a branch inherits as seen in every branch that it comes from: it must not be dropped there."""
    bound = live.record.branches[branch].fork_block
    for at, first in live.record.lineage(branch):
        live.progress.see(at, bound - 1)
        bound = min(bound, first)


def switch(live: LiveSession, branch: int) -> None:
    """Make another branch the current one."""
    if branch not in live.record.branches:
        known = ", ".join(str(number) for number in live.record.branches)
        raise refuse("branch", branch, f"there are the branches {known}", "name one of them")
    if branch == live.record.current:
        return
    live.settle()
    for track in live.tracks.values():
        track.keep_state(live.record.current)
    with live.lock:
        live.record.current = branch
        live.store.save_record()
    _move(live, None)


def _move(live: LiveSession, go: Callable[[Track], None] | None) -> None:
    """Bring the tracks to the current branch; a failure is reported, and `play` tries again."""
    try:
        if go is None:
            live.begin()
        else:
            for track in live.tracks.values():
                go(track)
    except Exception as error:
        live.fail(as_refusal(error))
    with live.lock:
        live.hub.publish({"type": "branch", **live.branch_shown(live.branch), "current": live.record.current})
    live.publish_timeline()
