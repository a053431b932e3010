"""This module executes the commands of clients on a live session, on the model's thread.

A session can go back to any second and continue there in a branch; all branches stay on disk, one is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from recap.errors import RecapError, refuse, unknown_name
from recap.io.cast import check_name
from recap.registry import ADMISSIONS
from recap.session import Session
from recap.session.batcher import note_rows, rows_at
from recap.studio import messages
from recap.studio.engine import as_refusal
from recap.studio.live import LiveSession
from recap.studio.settings import Limits
from recap.studio.store import BranchRecord
from recap.studio.track import apply_change

if TYPE_CHECKING:
    from recap.studio.shelf import Shelf

Change = dict[str, Any]


def carry_out(live: LiveSession, command: messages.Command, limits: Limits, shelf: Shelf) -> dict[str, Any]:
    """Execute a command, and return what happened; a refused command changes nothing."""
    playhead = getattr(command, "playhead_s", None)
    if playhead is not None:
        live.see(playhead)
    match command:
        case messages.PlayheadMessage():
            live.see(command.second)
        case messages.PlayMessage():
            live.play()
        case messages.PauseMessage():
            live.pause()
        case messages.PromptMessage():
            return _prompt(live, command, limits)
        case messages.DropCueMessage():
            return _drop_cue(live, command.block)
        case messages.BranchMessage():
            return {"branch": make_branch(live, command.second)}
        case messages.SwitchMessage():
            switch(live, command.branch)
        case messages.PinMessage() | messages.ForgetMessage():
            return _edit_bank(live, command)
        case messages.SetMessage():
            return _set(live, command)
        case messages.CastMessage():
            return _cast(live, command.name, shelf)
        case messages.DropCastMessage():
            return _on_each(live, {"kind": "drop_cast", "name": command.name})
    return {}


def _at(live: LiveSession, block: int) -> dict[str, Any]:
    return {"block": block, "second": live.clock.start_s(block)}


def check_prompt(text: str, limits: Limits) -> None:
    """Refuse a prompt that is too long, before anything reads it."""
    if len(text) > limits.prompt_characters:
        limit = f"has {len(text)} characters, and {limits.prompt_characters} are allowed"
        raise refuse("prompt", f"{text[:40]}...", limit, "shorten it")


def _prompt(live: LiveSession, command: messages.PromptMessage, limits: Limits) -> Change:
    check_prompt(command.text, limits)
    at = 0
    if command.at_s is not None:
        most = limits.session_seconds
        if not 0 <= command.at_s <= most:
            raise refuse("at_s", command.at_s, f"must be 0 to {most:.0f}", "name a second of the video")
        at = live.clock.block_from(command.at_s)

    def act(block: int) -> list[Change]:
        for track in live.tracks.values():
            track.session.prompt(command.text, block, cut=command.cut, reread=command.reread)
        return []

    return _at(live, live.direct(act, at))


def _drop_cue(live: LiveSession, block: int) -> Change:
    if block not in live.branch.cues or block < max(1, live.first_unseen):
        later = [at for at in live.branch.cues if at >= max(1, live.first_unseen)]
        raise refuse("block", block, f"prompts that can be removed begin at {later}", "name one of them")

    def act(_: int) -> list[Change]:
        for track in live.tracks.values():
            track.session.drop_cue(block)
        return []

    return _at(live, live.direct(act, block))


def _edit_bank(live: LiveSession, command: messages.PinMessage | messages.ForgetMessage) -> Change:
    """Pin or forget slots of the main track's bank, as a block listed them."""
    kind = "pin" if isinstance(command, messages.PinMessage) else "forget"
    if isinstance(command, messages.PinMessage):
        check_name(command.name)
    wanted = None if command.block is None else find_listed(live, messages.MAIN, command.block, command.slots)

    def act(block: int) -> list[Change]:
        session = live.tracks[messages.MAIN].session
        slots = command.slots if wanted is None else find_slots(session, wanted)
        change: Change = {"at": block, "track": messages.MAIN, "kind": kind, "slots": slots}
        if isinstance(command, messages.PinMessage):
            change["name"] = command.name
        apply_change(session, live.store.folder, change)
        return [change]

    return _at(live, live.direct(act))


def find_listed(
    live: LiveSession, track: str, block: int, slots: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return frame, row and column of slots as a block of the current branch listed them."""
    info = live.store.read_info(track, live.record.current, block)
    listed = {slot["slot"]: (slot["frame"], slot["row"], slot["column"]) for slot in info["bank"] or ()}
    for slot in slots:
        if slot not in listed:
            raise refuse("slots", slot, f"block {block} lists {len(listed)} slots", "name slots of that list")
    return [listed[slot] for slot in slots]


def find_slots(session: Session, sources: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the slots in which these tokens are now."""
    present = {tuple(slot.source): slot.number for slot in session.bank}
    for source in sources:
        if source not in present:
            limit = "it has left the bank since then"
            raise refuse("slots", list(source), limit, "choose one that the wall shows now")
    return [present[source] for source in sources]


def _set(live: LiveSession, command: messages.SetMessage) -> Change:
    """Change settings of the memory; another rule fills the bank again, the rest changes from a block on."""
    values = {"reinforcement": command.reinforcement, "capacity_frames": command.capacity_frames}
    changes = [{"kind": "set", name: value} for name, value in values.items() if value is not None]
    if not changes and command.admission is None:
        raise refuse("set", None, "names no setting", "give reinforcement, capacity_frames or admission")
    happened: Change = {}
    if command.admission is not None:
        if command.admission not in ADMISSIONS:
            raise unknown_name("admission", command.admission, ADMISSIONS)
        happened = _at(live, live.set_rule(command.admission))
    return _on_each(live, *changes) if changes else happened


def _cast(live: LiveSession, name: str, shelf: Shelf) -> Change:
    """Add a subject of the shelf to the session, which has its own copy of the file."""
    number = len(list((live.store.folder / "casts").glob("*.cast")))
    file = f"{number:04d}.cast"
    words = shelf.copy(name, live.store.folder / "casts" / file)
    try:
        return _on_each(live, {"kind": "cast", "file": file, "words": words})
    except ValueError:
        (live.store.folder / "casts" / file).unlink(missing_ok=True)
        raise


def _on_each(live: LiveSession, *changes: Change) -> Change:
    """Make each change on every track whose memory can take it; refuses it if none can."""

    def act(block: int) -> list[Change]:
        made: list[Change] = []
        for change in changes:
            refusals = []
            for name, track in live.tracks.items():
                own = {"at": block, "track": name, **change}
                if change["kind"] == "cast":
                    # Later prompts at the same block must not change how it was read.
                    own["prompt"] = track.session.prompt_at(block)
                try:
                    apply_change(track.session, live.store.folder, own)
                    made.append(own)
                except RecapError as error:
                    refusals.append(error)
            if len(refusals) == len(live.tracks):
                raise refusals[0]
        return made

    return _at(live, live.direct(act))


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

    def branch_off() -> None:
        for track in live.tracks.values():
            track.branch_off(block, live.branch)

    _move(live, branch_off)
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
    _move(live, live.begin)


def _move(live: LiveSession, act: Callable[[], None]) -> None:
    """Bring the tracks to the current branch; a failure is reported, and `play` tries again."""
    try:
        act()
    except Exception as error:
        live.fail(as_refusal(error))
    with live.lock:
        live.hub.publish({"type": "branch", **live.branch_shown(live.branch), "current": live.record.current})
    live.publish_timeline()
