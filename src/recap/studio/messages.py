"""This module defines the messages of clients to the studio, version 1; docs/studio-api.md lists them for readers.

The messages are plain dataclasses, which pydantic checks: a field too many, of another type, not finite or of another
version is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from recap.errors import RecapError, refuse
from recap.io.extras import import_extra

MAIN, SECOND = "main", "second"
"""The tracks of a session: its own memory, and another one that generates the same next to it."""

SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Has the fields of every message: the version, and the sender's own mark, which the answer repeats."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    v: Literal[1] = 1
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayheadMessage(Message):
    """Reports which second is on the screen: blocks up to there were seen, and some more are generated ahead."""

    type: Literal["playhead"] = "playhead"
    second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayMessage(Message):
    """Lets the session generate; also after a failure."""

    type: Literal["play"] = "play"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseMessage(Message):
    """Stops generating after the present block."""

    type: Literal["pause"] = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMessage(Message):
    """Changes the prompt at the first block that has not been seen, or at the later second `at_s`."""

    type: Literal["prompt"] = "prompt"
    text: str
    cut: bool = False
    reread: bool = False
    at_s: float | None = None
    playhead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCueMessage(Message):
    """Removes a prompt that begins at a block which has not been seen."""

    type: Literal["drop_cue"] = "drop_cue"
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchMessage(Message):
    """Goes back to a second of the current branch and continues from there in a new one."""

    type: Literal["branch"] = "branch"
    second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchMessage(Message):
    """Makes another branch the current one, which is generated."""

    type: Literal["switch"] = "switch"
    branch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinMessage(Message):
    """Pins slots of the bank as `block` listed them: they move to slots that are never taken."""

    type: Literal["pin"] = "pin"
    slots: list[int]
    name: str = "pinned"
    block: int | None = None
    playhead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetMessage(Message):
    """Empties slots of the bank as `block` listed them."""

    type: Literal["forget"] = "forget"
    slots: list[int]
    block: int | None = None
    playhead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMessage(Message):
    """Changes settings of the memory; what is left out stays."""

    type: Literal["set"] = "set"
    reinforcement: float | str | None = None
    capacity_frames: float | None = None
    admission: str | None = None
    playhead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CastMessage(Message):
    """Lets a subject of the shelf join the video."""

    type: Literal["cast"] = "cast"
    name: str
    playhead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCastMessage(Message):
    """Lets a subject, or what was pinned under a name, leave the memory."""

    type: Literal["drop_cast"] = "drop_cast"
    name: str
    playhead_s: float | None = None


Command = (
    PlayheadMessage
    | PlayMessage
    | PauseMessage
    | PromptMessage
    | DropCueMessage
    | BranchMessage
    | SwitchMessage
    | PinMessage
    | ForgetMessage
    | SetMessage
    | CastMessage
    | DropCastMessage
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWork(Message):
    """Has the fields that a new session and a new video share."""

    prompt: str
    seed: int = 0
    memory: str = "recap"
    # "auto" is the usual one of the memory.
    admission: str = "auto"
    reinforcement: float | str | None = None
    capacity_frames: float | None = None
    cast: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession(NewWork):
    """Asks for a session; `second_memory` names another memory that generates the same next to the first."""

    second_memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVideo(NewWork):
    """Asks for a video of some seconds, to be polled and downloaded."""

    seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSubject(Message):
    """Asks to keep a subject: slots of the bank as `block` listed them, or a box of pixels at a second."""

    name: str
    words: str = ""
    track: Literal["main", "second"] = "main"
    slots: list[int] | None = None
    block: int | None = None
    box: list[float] | None = None
    second: float | None = None


def read_command(data: str | bytes) -> Command:
    """Read a command of a client from JSON."""
    found: Command = read_message(data, Command)
    return found


def read_message(data: str | bytes, kind: Any) -> Any:
    """Read a message of some kind from JSON; anything else is refused."""
    pydantic = import_extra("pydantic", "recap studio", "studio")
    try:
        return checker(kind).validate_json(data)
    except pydantic.ValidationError as error:
        raise _as_refusal(error.errors(include_url=False)[0]) from None


@cache
def checker(kind: Any) -> Any:
    """Return what checks messages of this kind."""
    pydantic = import_extra("pydantic", "recap studio", "studio")
    if kind is Command:
        kind = Annotated[Command, pydantic.Field(discriminator="type")]
    return pydantic.TypeAdapter(kind)


def _as_refusal(problem: dict[str, Any]) -> RecapError:
    """Make the error about a wrong message; of a long value the beginning is shown."""
    # Where in the message it is; the first part of a command's path is its type.
    field = ".".join(str(part) for part in problem["loc"] if part not in ("", None)) or "message"
    value = problem.get("input")
    shown = value if isinstance(value, int | float | bool) else str(value)[:SHOWN_CHARACTERS]
    limit = str(problem["msg"])[0].lower() + str(problem["msg"])[1:]
    return refuse(field, shown, limit, "see the page /docs of this server")
