"""A track generates one video of a session with one memory; it can be built again from what is on disk."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recap.config import RunConfig, choose
from recap.contracts import Backbone
from recap.errors import refuse
from recap.eval.embedders import HsvEmbedder
from recap.io.report import Reporter
from recap.io.trace import BlockTrace
from recap.rollout import reach
from recap.session import Session
from recap.session.batcher import ALONE, Batcher
from recap.session.values import Edit, Slot, Snapshot
from recap.studio.messages import MAIN
from recap.studio.segments import Pictures
from recap.studio.store import LASTING_EVERY, STATE_EVERY, BranchRecord, SessionStore, read_state
from recap.studio.watching import WatchingKernels
from recap.types import BackboneSpec, GeneratedBlock

HISTORY_S = 120.0
"""How far back a branch can go without reading its files, in seconds of video."""

STATES_BYTES = 128 * 2**20
SMALL_STATE = 64 * 2**20
"""States up to this size are kept more often: a killed session reads fewer blocks again."""


class Clock:
    """Converts between seconds and blocks."""

    def __init__(self, spec: BackboneSpec) -> None:
        self.spec = spec

    def first_picture(self, block: int) -> int:
        return self.spec.num_pictures(block * self.spec.frames_per_block)

    def start_s(self, block: int) -> float:
        return self.first_picture(block) / self.spec.pictures_per_second

    def block_at(self, second: float) -> int:
        """Return the block whose pictures are shown at a second."""
        picture = int(max(0.0, second) * self.spec.pictures_per_second + 1e-6)
        block = self.spec.num_frames(picture + 1) // self.spec.frames_per_block
        while self.first_picture(block) > picture:
            block -= 1
        while self.first_picture(block + 1) <= picture:
            block += 1
        return block

    def block_from(self, second: float) -> int:
        """Return the first block that begins at a second or later."""
        block = self.block_at(second)
        return block if self.start_s(block) >= second - 1e-6 else block + 1


class Track:
    """Owns the session of one memory on the current branch."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        backbone: Backbone,
        store: SessionStore,
        reporter: Reporter,
        batcher: Batcher = ALONE,
    ) -> None:
        self.name = name
        self.config = config
        self._backbone = backbone
        self._store = store
        self._reporter = reporter
        self._batcher = batcher
        self.clock = Clock(backbone.spec)
        self._watching = WatchingKernels()
        # Set by the first `build`.
        self.session: Session

    def _rule(self, branch: int) -> str:
        return self._store.record.branches[branch].rule or self.config.admission.name

    def _empty(self, branch: int) -> Session:
        rule = self._rule(branch)
        own = rule == self.config.admission.name
        config = self.config if own else replace(self.config, admission=choose("admission", rule))
        return Session(
            config,
            backbone=self._backbone,
            reporter=self._reporter,
            history_s=HISTORY_S,
            states_bytes=STATES_BYTES,
            kernels=self._watching,
            batcher=self._batcher,
        )

    def step(
        self, branch: int, latents: Tensor | None = None, earlier: BlockTrace | None = None
    ) -> Generator[Session, GeneratedBlock, tuple[GeneratedBlock, dict[str, Any]]]:
        """Request the next block, or read it from known latents; returns it with what a page shows of it."""
        before = self.session.bank
        self._watching.begin()
        made = (yield self.session) if latents is None else self.session.step(latents)
        # The slots are those that the block could read; what entered the bank with it has no share yet.
        shares = self._watching.slots()
        by_token = {slot.source: shares[slot.number] for slot in before if slot.number < len(shares)}
        return made, self._describe(made, branch, by_token, earlier)

    def build(self, branch: int, blocks: int) -> None:
        """Rebuild the session as it was after so many blocks of a branch, from the nearest state on disk."""
        record = self._store.record.branches[branch]
        changes = self._changes(record)
        session, start = self._restored(record, branch, blocks, changes)
        known = self._store.read_latents(self.name, branch, range(start, blocks))
        for block in range(start, blocks + 1):
            for change in changes:
                if change["at"] == block:
                    apply_change(session, self._store.folder, change)
            if block < blocks:
                session.step(known[block])
        self.session = session

    def _changes(self, record: BranchRecord) -> list[dict[str, Any]]:
        return [change for change in record.changes if change["track"] == self.name]

    def _restored(
        self, record: BranchRecord, branch: int, blocks: int, changes: list[dict[str, Any]]
    ) -> tuple[Session, int]:
        """Return a session at the last state on disk that can be used, and the block that it is for."""
        session = self._empty(branch)
        spec = self._backbone.spec
        plain = session.snapshot()
        for start, path in self._store.states(self.name, branch, blocks, self._rule(branch)):
            state = read_state(path)
            if state is None:
                continue
            near = range(max(0, start - reach(spec)), start)
            latents = self._store.read_latents(self.name, branch, near)
            first = self._store.read_latents(self.name, branch, [0])[0][:, :1]
            before = [change for change in changes if change["at"] < start]
            kept = Snapshot(
                plain.config,
                start,
                dict(record.cues),
                {c["at"]: c["reinforcement"] for c in before if c.get("reinforcement") is not None},
                edits_of(before, session, self._store.record.cast),
                state,
                first,
                latents,
                {start: state},
                dict(record.rows),
            )
            try:
                session.restore(kept)
            except ValueError:
                # A state that does not fit can be made again from latents.
                session = self._empty(branch)
                continue
            return session, start
        session.restore(replace(plain, cues=dict(record.cues), rows=dict(record.rows)))
        return session, 0

    def go_back(self, block: int, record: BranchRecord) -> None:
        """Do what `build` does, without reading files where the session still has the state."""
        if block < self.session.oldest_block:
            self.build(record.id, block)
            return
        self.session.rewind(block)
        for change in self._changes(record):
            if change["at"] == block:
                apply_change(self.session, self._store.folder, change)

    def branch_off(self, block: int, record: BranchRecord) -> None:
        """Go back to where a branch begins, and take its timeline."""
        self.go_back(block, record)
        now = self.session.snapshot()
        earlier = {at: factor for at, factor in now.reinforcements.items() if at < block}
        self.session.restore(replace(now, cues=dict(record.cues), reinforcements=earlier))

    def keep_state(self, branch: int) -> None:
        """Write the present state to disk, if the session still has it."""
        block, state = self.session.next_block, self.session.kept_state
        if block and state is not None:
            self._store.write_state(self.name, branch, block, self._rule(branch), state)

    def keep_state_if_due(self, branch: int) -> None:
        """Call `keep_state` every few blocks."""
        state = self.session.kept_state
        often = state is not None and state.num_bytes <= SMALL_STATE
        if self.session.next_block % (STATE_EVERY if often else LASTING_EVERY) == 0:
            self.keep_state(branch)

    def _describe(
        self,
        made: GeneratedBlock,
        branch: int,
        slot_shares: Mapping[tuple[int, ...], float],
        earlier: BlockTrace | None,
    ) -> dict[str, Any]:
        """Return what a page shows of a finished block, as plain data; of one that was read, an earlier trace."""
        index, block_end = made.block.index, self.clock.start_s(made.block.index + 1)
        if not bool(torch.isfinite(made.latents).all()):
            raise refuse("latents", f"block {index}", "holds NaN or infinity", "change the memory's settings")
        trace = (
            BlockTrace.of(made) if earlier is None else replace(BlockTrace.of(made), shares=earlier.shares)
        )
        shares = {str(role): None if share is None else share[0] for role, share in trace.shares.items()}
        if None in shares.values() and earlier is None and self._watching.clean_only:
            # Fast kernels measure only roles with a bias; two ways of measuring in one bar would not add up.
            shares = {**dict.fromkeys(shares), **self._watching.shares()}
        return {
            "v": 1,
            "type": "block",
            "track": self.name,
            "branch": branch,
            "index": index,
            "start_s": self.clock.start_s(index),
            "end_s": block_end,
            "prompt": made.block.prompts[0],
            "cut": made.block.clears_prior,
            "bank": self._bank(block_end, slot_shares),
            "shares": shares,
            "tokens": {str(role): count for role, count in trace.tokens.items()},
            "overlay": self._overlay(),
            "trace": trace.to_json(),
        }

    def _bank(self, now_s: float, shares: Mapping[tuple[int, ...], float]) -> list[dict[str, Any]] | None:
        """Return the slots of the bank; None for a memory that has none."""
        if not self.config.memory.settings.keeps_bank:
            return None
        return [self._slot(slot, now_s, shares.get(slot.source)) for slot in self.session.bank]

    def _overlay(self) -> dict[str, Any] | None:
        """Return where in the picture each role was read; None where the model does not show it."""
        rows, columns = self._backbone.spec.grid
        maps = self._watching.maps((rows, columns))
        measured = "clean pass" if self._watching.clean_only else "steps"
        return {"rows": rows, "columns": columns, "roles": maps, "measured": measured} if maps else None

    def _slot(self, slot: Slot, now_s: float, share: float | None) -> dict[str, Any]:
        """Return a slot of the bank: where its token was seen, and in which picture of which block."""
        spec = self._backbone.spec
        frame, row, column = slot.source
        block = frame // spec.frames_per_block
        picture = spec.num_pictures(frame)
        second = picture / spec.pictures_per_second
        return {
            "slot": slot.number,
            "frame": frame,
            "row": row,
            "column": column,
            "score": round(slot.score, 4),
            "second": second,
            "age_s": round(now_s - second, 4),
            "block": block,
            "picture": picture - self.clock.first_picture(block),
            "share": None if share is None else round(share, 6),
        }


def apply_change(session: Session, folder: Path, change: Mapping[str, Any]) -> None:
    """Make a recorded change of the memory in a session."""
    match change["kind"]:
        case "pin":
            session.pin(change["slots"], change["name"])
        case "forget":
            session.forget(change["slots"])
        case "cast":
            session.cast(str(folder / "casts" / change["file"]), prompt=change["prompt"])
        case "drop_cast":
            session.drop_cast(change["name"])
        case "set":
            settings = ("reinforcement", "capacity_frames")
            session.set(**{name: change[name] for name in settings if name in change})


def edits_of(
    changes: list[dict[str, Any]], session: Session, cast: Sequence[str]
) -> dict[int, tuple[Edit, ...]]:
    """Return edits for changes that a state contains: what prompts say for each name, and the size of the bank.

    `cast` names the subjects that were there from the first block on.
    """
    found: dict[int, tuple[Edit, ...]] = {}
    names = set(cast)
    for change in changes:
        words: dict[str, str | None] = dict(change.get("words", {}))
        # Tokens that are pinned under the name of a present subject join it, and its words stay.
        if change["kind"] == "pin" and change["name"] not in names:
            words = {change["name"]: f"a {change['name']}"}
        if change["kind"] == "drop_cast":
            words = {change["name"]: None}
        names = {name for name in (*names, *words) if words.get(name, "") is not None}
        if "capacity_frames" in change:
            found[change["at"]] = (*found.get(change["at"], ()), session.resizing(change["capacity_frames"]))
        if words:
            found[change["at"]] = (*found.get(change["at"], ()), Edit(lambda policy: None, words))
    return found


def pictures_of(made: GeneratedBlock) -> Pictures:
    """Return the pictures of a block's first row, T Y X 3."""
    pixels = made.pixels[0].clamp(0, 1).mul(255).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(0, 2, 3, 1).cpu().numpy())


def likeness(picture: NDArray[np.uint8], first: NDArray[np.uint8]) -> float:
    """Return how similar the colours of two pictures are, 0..1; with a video's first picture it falls with drift."""
    vectors = HsvEmbedder().embed([picture, first])
    return round(float(vectors[0] @ vectors[1]), 4)


def movement(pictures: Pictures) -> float:
    """Return how much the pictures of a block differ from one to the next, 0..1."""
    differences = np.abs(np.diff(pictures.astype(np.int16), axis=0))
    return round(float(differences.mean()) / 255, 5) if len(pictures) > 1 else 0.0


def settings_of(config: RunConfig, changes: Sequence[Mapping[str, Any]], rule: str) -> dict[str, Any]:
    """Return the settings of a memory that can be changed while it works, as they are after these changes."""
    names = ("reinforcement", "capacity_frames")
    found = {name: getattr(config.memory.settings, name, None) for name in names}
    found["admission"] = config.admission.name if config.memory.settings.keeps_bank else None
    found["admission"] = rule or found["admission"]
    for change in changes:
        if change["kind"] == "set" and change["track"] == MAIN:
            found |= {name: change[name] for name in found if change.get(name) is not None}
    return found


def names_of(first: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the subjects in the memory of the main track after these changes."""
    names = dict.fromkeys(first)
    for change in changes:
        if change["track"] == MAIN and change["kind"] == "pin":
            names[change["name"]] = None
        if change["track"] == MAIN and change["kind"] == "cast":
            names |= dict.fromkeys(change["words"])
        if change["track"] == MAIN and change["kind"] == "drop_cast":
            names.pop(change["name"], None)
    return list(names)
