"""The store keeps sessions on disk, so that a killed server loses nothing that it showed.

A session is a folder: `session.json` says what decides the video (configs, branches and their timelines), and for
every track and branch there are four files a block. All are written whole, the block's JSON last: a block without
it does not exist. Now and then the state of the memory is kept too, which saves reading every block again.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from recap.config import refuse_code
from recap.errors import RecapError, refuse
from recap.io.cast import NAME
from recap.io.files import check_plain, remove_strays, write_whole
from recap.io.run_folder import pack_state, unpack_state
from recap.registry import ADMISSIONS
from recap.session.batcher import MOST_ROWS, note_rows, rows_at
from recap.session.values import Cue, MemoryState
from recap.studio.messages import MAIN, SECOND

RECORD = "session.json"
ID = re.compile(r"[0-9a-f]{16}")
FILE = re.compile(r"[0-9]{4}\.cast")
INFO, LATENTS, MEDIA, STRIP = ".json", ".safetensors", ".m4s", ".jpg"
STATE_EVERY, LASTING_EVERY = 8, 32
"""Blocks between two states on disk: of the last blocks, and of all others."""
DAMAGED = "delete the session, or put its files back"
OTHER_ROWS = (
    "Blocks before {block} were generated with --batch {before}; from there on it is {now}, which rounds "
    "differently. The session's record says so."
)


@dataclass(slots=True)
class BranchRecord:
    """Records what decides one branch: where it left its parent, its prompts, and the changes of its memory."""

    id: int
    parent: int | None = None
    fork_block: int = 0
    cues: dict[int, Cue] = field(default_factory=dict)
    # Each has `at`, the block before which it happened, `kind`, and what that kind needs.
    changes: list[dict[str, Any]] = field(default_factory=list)
    # The admission rule that has filled the bank from the first block on; "" for the one of the config.
    rule: str = ""
    # Rows of the forward in which blocks were generated, by the block from which on it had so many (`--batch`). An
    # older record has none, and before the first one it is 1.
    rows: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        cues = [{"block": block, **asdict(cue)} for block, cue in sorted(self.cues.items())]
        tree = {"id": self.id, "parent": self.parent, "fork_block": self.fork_block}
        rows = [{"block": block, "rows": number} for block, number in sorted(self.rows.items())]
        return {**tree, "cues": cues, "changes": self.changes, "rule": self.rule, "batch": rows}

    def note_rows(self, block: int, number: int) -> str:
        """Note that blocks from `block` on are generated in so many rows; returns a notice where that is new."""
        before = rows_at(self.rows, block - 1)
        self.rows = note_rows(self.rows, block, number)
        return OTHER_ROWS.format(before=before, block=block, now=number) if block and before != number else ""

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> BranchRecord:
        cues = {cue["block"]: Cue(cue["prompt"], cue["cut"], cue["reread"]) for cue in plain["cues"]}
        tree = (plain["id"], plain["parent"], plain["fork_block"])
        rows = {noted["block"]: noted["rows"] for noted in plain.get("batch", ())}
        return cls(*tree, cues, list(plain["changes"]), str(plain["rule"]), rows)


@dataclass(slots=True)
class SessionRecord:
    """Records what decides a session. `tracks` has a config for each track, without the paths of its cast."""

    id: str
    created: float
    tracks: dict[str, dict[str, Any]]
    cast: list[str] = field(default_factory=list)
    branches: dict[int, BranchRecord] = field(default_factory=dict)
    current: int = 0

    def lineage(self, branch: int) -> list[tuple[int, int]]:
        """Return (branch, its first own block), from the branch back to the first one."""
        found: list[tuple[int, int]] = []
        at: int | None = branch
        while at is not None:
            record = self.branches[at]
            found.append((at, record.fork_block))
            at = record.parent
        return found

    def owner(self, branch: int, block: int) -> int:
        """Return the branch that generated this block of a branch."""
        return next(at for at, first in self.lineage(branch) if block >= first or first == 0)

    def summary(self) -> dict[str, Any]:
        """Return what a list of sessions says about this one while it is not open."""
        prompts = [cue.prompt for cue in self.branches[self.current].cues.values()]
        about = {"session": self.id, "created": self.created, "open": False, "branches": len(self.branches)}
        return {**about, "prompt": prompts[0] if prompts else ""}

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("id", "created", "tracks", "cast", "current")}
        return {"v": 1, **plain, "branches": [branch.to_json() for branch in self.branches.values()]}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> SessionRecord:
        branches = [BranchRecord.from_json(branch) for branch in plain["branches"]]
        named = {branch.id: branch for branch in branches}
        own = {name: plain[name] for name in ("id", "created", "tracks", "cast", "current")}
        return cls(**own, branches=named)


class SessionStore:
    """Reads and writes the files of one session."""

    def __init__(self, folder: Path, record: SessionRecord) -> None:
        self.folder = folder
        self.record = record

    def clean(self) -> None:
        """Delete what a killed server left half-written; refuses links, which lead to files elsewhere."""
        try:
            check_plain(self.folder, "session")
        except RecapError as error:
            # The message has a path of this machine, which clients must not see.
            limit = "has a link or a device in its folder"
            raise refuse("session", self.record.id, limit, DAMAGED) from error
        for path in [self.folder, *self.folder.rglob("*")]:
            if path.is_dir():
                remove_strays(path)

    def save_record(self) -> None:
        """Write the session's record; it is valid from here on, also after a kill."""
        write_whole(self.folder / RECORD, json.dumps(self.record.to_json()).encode())

    def _branch_folder(self, track: str, branch: int) -> Path:
        return self.folder / "tracks" / track / str(branch)

    def path(self, track: str, branch: int, block: int, kind: str) -> Path:
        """Name a file of a block, in the branch that generated it."""
        return self._branch_folder(track, self.record.owner(branch, block)) / f"{block:06d}{kind}"

    def count(self, track: str, branch: int) -> int:
        """Return how many blocks a branch has on disk, those of its parents included."""
        number = self.record.branches[branch].fork_block
        while self.path(track, branch, number, INFO).is_file():
            number += 1
        return number

    def write_block(
        self, track: str, branch: int, info: dict[str, Any], latents: Tensor, media: bytes, strip: bytes
    ) -> None:
        """Write all files of a block, its JSON last."""
        block = info["index"]
        tensors = save({"latents": latents.detach().cpu().contiguous()})
        for kind, data in ((LATENTS, tensors), (MEDIA, media), (STRIP, strip)):
            write_whole(self.path(track, branch, block, kind), data)
        write_whole(self.path(track, branch, block, INFO), json.dumps(info).encode())

    def drop_blocks(self, track: str, branch: int, first: int) -> None:
        """Delete a branch's own blocks from `first` on, the last one first, and states that have seen them."""
        folder = self._branch_folder(track, branch)
        own = sorted(folder.glob(f"*{INFO}"), reverse=True)
        for info in own:
            if int(info.stem) >= first:
                for kind in (INFO, LATENTS, MEDIA, STRIP):
                    info.with_suffix(kind).unlink(missing_ok=True)
        for state in folder.glob("state-*.safetensors"):
            if int(state.stem.split("-")[1]) > first:
                state.unlink(missing_ok=True)

    def write_init(self, track: str, branch: int, init: bytes) -> None:
        write_whole(self._branch_folder(track, branch) / "init.mp4", init)

    def read_init(self, track: str, branch: int) -> bytes:
        for at, _ in self.record.lineage(branch):
            path = self._branch_folder(track, at) / "init.mp4"
            if path.is_file():
                return path.read_bytes()
        raise refuse("block", 0, "nothing of this branch is generated yet", "wait for the first block")

    def read(self, track: str, branch: int, block: int, kind: str) -> bytes:
        """Read a file of a block."""
        path = self.path(track, branch, block, kind)
        if not path.is_file() or not path.with_suffix(INFO).is_file():
            last = self.count(track, branch) - 1
            raise refuse("block", block, f"branch {branch} has the blocks 0 to {last}", "name one of them")
        return path.read_bytes()

    def read_info(self, track: str, branch: int, block: int) -> dict[str, Any]:
        info = json.loads(self.read(track, branch, block, INFO))
        return {**info, "branch": branch}

    def read_latents(self, track: str, branch: int, blocks: Sequence[int]) -> dict[int, Tensor]:
        """Read the latents of blocks."""
        found = {}
        for block in blocks:
            path = self.path(track, branch, block, LATENTS)
            try:
                found[block] = load_file(path)["latents"]
            except (OSError, SafetensorError, KeyError) as error:
                raise refuse("block", block, "its latents are missing or damaged", DAMAGED) from error
            if not bool(torch.isfinite(found[block]).all()):
                raise refuse("block", block, "its latents hold NaN or infinity", DAMAGED)
        return found

    def write_state(self, track: str, branch: int, block: int, rule: str, state: MemoryState) -> None:
        """Keep the memory as it was when `block` came next, before any change there, with a bank by this rule."""
        path = self._branch_folder(track, branch) / f"state-{block:06d}-{rule}.safetensors"
        write_whole(path, save(pack_state(state.policy, state.decoder)))
        for number, earlier in self._own_states(track, branch, rule):
            # The one before stays, since the last blocks may not be on disk yet.
            if number % LASTING_EVERY and number < block - STATE_EVERY:
                earlier.unlink(missing_ok=True)

    def _own_states(self, track: str, branch: int, rule: str) -> list[tuple[int, Path]]:
        """Return the states of a branch by a rule, the last one first."""
        paths = sorted(self._branch_folder(track, branch).glob(f"state-*-{rule}.safetensors"), reverse=True)
        found = [(int(path.stem.split("-")[1]), path) for path in paths]
        # Rules have names like flow and flow-texture.
        return [(number, path) for number, path in found if path.stem == f"state-{number:06d}-{rule}"]

    def states(self, track: str, branch: int, most: int, rule: str) -> Iterator[tuple[int, Path]]:
        """Yield the kept states of a branch and its parents up to block `most`, the last one first."""
        end = most
        for at, first in self.record.lineage(branch):
            for number, path in self._own_states(track, at, rule):
                if first < number <= end:
                    yield number, path
            end = min(end, first)


def _check_record(record: SessionRecord, name: str) -> None:
    """Refuse a record whose names would be code or paths, or with an impossible number of rows."""
    for branch in record.branches.values():
        for block, number in branch.rows.items():
            if type(block) is not int or block < 0:
                raise KeyError(block)
            if type(number) is not int or not 1 <= number <= MOST_ROWS:
                limit = f"its record is damaged: a batch has 1 to {MOST_ROWS} rows, that of block {block} not"
                raise refuse("session", name, limit, DAMAGED)
    # Files are data, and anybody may have written them.
    for track, config in record.tracks.items():
        refuse_code(config, RECORD)
        if track not in (MAIN, SECOND):
            raise KeyError(track)
    files = [
        change["file"] for branch in record.branches.values() for change in branch.changes if "file" in change
    ]
    plain = all(FILE.fullmatch(file) for file in files) and all(NAME.fullmatch(each) for each in record.cast)
    rules = all(branch.rule in ("", *ADMISSIONS) for branch in record.branches.values())
    numbers = all(isinstance(number, int) for number in record.branches) and record.current in record.branches
    parents = all(
        branch.parent is None or (branch.parent in record.branches and branch.parent < branch.id)
        for branch in record.branches.values()
    )
    if record.id != name or not (plain and rules and numbers and parents):
        raise KeyError(name)


def read_state(path: Path) -> MemoryState | None:
    """Read a kept state; None where it is damaged, since it can be made again."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    return MemoryState(*unpack_state(tensors))


class StudioFolder:
    """Manages the folder of a studio: its sessions, casts and videos."""

    def __init__(self, root: Path, disk_bytes: int) -> None:
        self.root = root.expanduser().resolve()
        self._disk_bytes = disk_bytes
        for name in ("sessions", "casts", "videos"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def new(self, record: SessionRecord) -> SessionStore:
        """Make the folder of a new session."""
        folder = self.root / "sessions" / record.id
        folder.mkdir()
        return SessionStore(folder, record)

    def ids(self) -> list[str]:
        """Return the sessions that are on disk."""
        found = (path.parent for path in (self.root / "sessions").glob(f"*/{RECORD}"))
        return sorted(folder.name for folder in found if ID.fullmatch(folder.name))

    def load(self, name: str) -> SessionStore:
        """Read the record of a session that is on disk."""
        if not ID.fullmatch(name) or name not in self.ids():
            raise no_session(name)
        folder = self.root / "sessions" / name
        try:
            record = SessionRecord.from_json(json.loads((folder / RECORD).read_bytes()))
            _check_record(record, name)
        except RecapError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise refuse("session", name, "its record is damaged", DAMAGED) from error
        return SessionStore(folder, record)

    def delete(self, name: str) -> None:
        """Delete a session's folder; the record goes first, so that half a folder is not offered."""
        folder = self.root / "sessions" / name
        (folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def check_room(self) -> None:
        """Refuse to write more than the limit of the studio, or to a disk that is nearly full."""
        used = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if used > self._disk_bytes:
            limit = f"sessions, casts and videos may take {self._disk_bytes / 1e9:.3g} GB in all"
            raise refuse("disk", f"{used / 1e9:.3g} GB", limit, "delete sessions or videos")
        free = shutil.disk_usage(self.root).free
        if free < 64 * 2**20:
            raise refuse("disk", f"{free / 1e6:.0f} MB free", "64 MB must stay free", "make room there")


def no_session(name: str) -> RecapError:
    """Make the error about a session that is nowhere."""
    return refuse("session", name[:60], "there is no such session", "GET /v1/sessions lists them")


def new_id() -> str:
    """Return a random name, which clients can neither guess nor choose."""
    return secrets.token_hex(8)
