"""This module executes the commands of clients on a live session, on the model's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recap.errors import RecapError, refuse, unknown_name
from recap.io.cast import check_name
from recap.registry import ADMISSIONS
from recap.session import Session
from recap.studio import messages
from recap.studio.branching import make_branch, switch
from recap.studio.live import LiveSession
from recap.studio.settings import Limits
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
