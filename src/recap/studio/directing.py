"""This module carries out the commands of clients on a live session; on the model's thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recap.errors import RecapError, refuse
from recap.io.cast import NAME
from recap.session import Session
from recap.studio import messages as say
from recap.studio.live import LiveSession
from recap.studio.settings import Limits
from recap.studio.track import apply_change

Change = dict[str, Any]


def carry_out(live: LiveSession, command: say.Command, limits: Limits) -> dict[str, Any]:
    """Do what a client asks, and return what happened; what cannot be done is refused and changes nothing."""
    playhead = getattr(command, "playhead_s", None)
    if playhead is not None:
        live.see(playhead)
    match command:
        case say.PlayheadMessage():
            live.see(command.second)
        case say.PlayMessage():
            live.play()
        case say.PauseMessage():
            live.pause()
        case say.PromptMessage():
            return _prompt(live, command, limits)
        case say.DropCueMessage():
            return _drop_cue(live, command.block)
        case say.BranchMessage():
            return {"branch": live.make_branch(command.second)}
        case say.SwitchMessage():
            live.switch(command.branch)
        case say.PinMessage() | say.ForgetMessage():
            return _edit_bank(live, command)
        case say.SetMessage():
            return _set(live, command)
        case say.DropCastMessage():
            return _on_each(live, {"kind": "drop_cast", "name": command.name})
    return {}


def _at(live: LiveSession, block: int) -> dict[str, Any]:
    return {"block": block, "second": live.clock.start_s(block)}


def check_prompt(text: str, limits: Limits) -> None:
    """Refuse a prompt that is too long, before anything reads it."""
    if len(text) > limits.prompt_characters:
        limit = f"has {len(text)} characters, and {limits.prompt_characters} are allowed"
        raise refuse("prompt", f"{text[:40]}...", limit, "shorten it")


def _prompt(live: LiveSession, command: say.PromptMessage, limits: Limits) -> Change:
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


def _edit_bank(live: LiveSession, command: say.PinMessage | say.ForgetMessage) -> Change:
    """Pin or forget slots of the main track's bank, as a block listed them."""
    kind = "pin" if isinstance(command, say.PinMessage) else "forget"
    if isinstance(command, say.PinMessage) and not NAME.fullmatch(command.name):
        limit = "must begin with a letter and have at most 40 letters, digits, - and _"
        raise refuse("name", command.name, limit, "for example fox")
    wanted = None if command.block is None else listed_sources(live, command.block, command.slots)

    def act(block: int) -> list[Change]:
        session = live.tracks[say.MAIN].session
        slots = command.slots if wanted is None else find_slots(session, wanted)
        change: Change = {"at": block, "track": say.MAIN, "kind": kind, "slots": slots}
        if isinstance(command, say.PinMessage):
            change["name"] = command.name
        apply_change(session, live.store.folder, change)
        return [change]

    return _at(live, live.direct(act))


def listed_sources(live: LiveSession, block: int, slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return frame, row and column of slots as a block of the current branch listed them."""
    info = live.store.read_info(say.MAIN, live.record.current, max(0, block))
    listed = {slot["slot"]: (slot["frame"], slot["row"], slot["column"]) for slot in info["bank"] or ()}
    for slot in slots:
        if slot not in listed:
            raise refuse("slots", slot, f"block {block} lists {len(listed)} slots", "name slots of that list")
    return [listed[slot] for slot in slots]


def find_slots(session: Session, sources: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the slots in which these tokens are now."""
    held = {tuple(slot.source): slot.number for slot in session.bank}
    for source in sources:
        if source not in held:
            limit = "it has left the bank since then"
            raise refuse("slots", list(source), limit, "choose one that the wall shows now")
    return [held[source] for source in sources]


def _set(live: LiveSession, command: say.SetMessage) -> Change:
    values = {"reinforcement": command.reinforcement}
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        raise refuse("set", None, "names no setting", "give reinforcement, capacity_frames or admission")
    if command.reinforcement is not None and not math.isfinite(command.reinforcement):
        raise refuse("reinforcement", command.reinforcement, "must be finite", "5 is the default")
    return _on_each(live, {"kind": "set", **given})


def _on_each(live: LiveSession, change: Change) -> Change:
    """Make a change on every track whose memory can take it; refuses it if none can."""

    def act(block: int) -> list[Change]:
        made, refused = [], None
        for name, track in live.tracks.items():
            own = {"at": block, "track": name, **change}
            try:
                apply_change(track.session, live.store.folder, own)
                made.append(own)
            except RecapError as error:
                refused = refused or error
        if not made and refused is not None:
            raise refused
        return made

    return _at(live, live.direct(act))
