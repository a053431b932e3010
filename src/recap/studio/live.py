"""A live session is directed while it is watched; all but `_finish` and `hello` runs on the model's thread.

Commands take effect at the first block that has not been seen. What was generated after that is dropped, from the
memory and from the disk, and generated again. A block is shown when it is on disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from threading import RLock
from typing import Any

from torch import Tensor

from recap.errors import RecapError, refuse
from recap.io.trace import BlockTrace
from recap.io.video import Picture
from recap.studio.engine import Engine, Requests, as_refusal
from recap.studio.hub import Hub, Subscriber
from recap.studio.messages import MAIN
from recap.studio.progress import BranchProgress
from recap.studio.segments import Pictures, decode_pictures, encode_block, picture_strip
from recap.studio.settings import StudioSettings
from recap.studio.store import LASTING_EVERY, MEDIA, BranchRecord, SessionStore
from recap.studio.track import Track, likeness, movement, names_of, pictures_of, settings_of

RATE_BLOCKS = 8
"""Over how many blocks the rate is measured."""

HELLO_BLOCKS = 800
"""How many blocks `hello` describes: ten minutes; the others can be fetched."""

LIGHT = ("index", "start_s", "end_s", "prompt", "cut", "shares", "motion", "likeness")
"""The fields of a block in `hello`; the rest is in the block's own JSON."""


class LiveSession:
    """Generates, keeps and shows one session."""

    def __init__(
        self,
        store: SessionStore,
        tracks: Sequence[Track],
        engine: Engine,
        settings: StudioSettings,
        check_room: Callable[[], None],
    ) -> None:
        self.store = store
        self.record = store.record
        self.tracks = {track.name: track for track in tracks}
        self.playing = True
        self.message = ""
        self._engine = engine
        self._check_room = check_room
        self.settings = settings
        self.clock = tracks[0].clock
        self._spec = self.clock.spec
        self.hub = Hub(settings.limits.subscribers)
        # Both threads acquire it while files and events of blocks change.
        self.lock = RLock()
        self.progress = BranchProgress(self.tracks)
        self._speed: deque[tuple[int, float]] = deque(maxlen=RATE_BLOCKS)
        self._firsts: dict[str, Picture] = {}
        self._broken = False
        # Of a run that was uploaded: blocks that are read instead of generated, and what its trace says of them.
        self.known: dict[int, Tensor] = {}
        self.traces: dict[int, BlockTrace] = {}

    # Generating

    @property
    def next_block(self) -> int:
        return self.tracks[MAIN].session.next_block

    @property
    def branch(self) -> BranchRecord:
        return self.record.branches[self.record.current]

    def begin(self) -> None:
        """Build the sessions of the current branch from what is on disk, which counts as seen."""
        branch = self.record.current
        blocks = min(self.store.count(name, branch) for name in self.tracks)
        for name, track in self.tracks.items():
            self.store.drop_blocks(name, branch, blocks)
            track.build(branch, blocks)
        rows = max(track.session.num_rows for track in self.tracks.values())
        if notice := self.branch.note_rows(max([blocks, *(index + 1 for index in self.known)]), rows):
            self.message = notice
            # So that earlier blocks need not be read in their own number of rows each time.
            for track in self.tracks.values():
                track.keep_state(branch)
        with self.lock:
            self.progress.begin(branch, blocks)
        self._broken = False

    def wants_block(self) -> bool:
        waiting = self.next_block - self.first_unseen < self.settings.lead_blocks
        return self.playing and not self._broken and (waiting or bool(self.known))

    def make_block(self) -> Requests:
        """Request one block of every track, and pass it to the encoder."""
        index, branch = self.next_block, self.record.current
        most = self.settings.limits.session_seconds
        if self.clock.start_s(index) >= most:
            raise refuse("session", f"{most:.0f} s", "is as long as this studio allows", "begin another one")
        if index % LASTING_EVERY == LASTING_EVERY - 1:
            self._check_room()
        seconds = pictures = 0.0
        for track in self.tracks.values():
            began = time.perf_counter()
            made, info = yield from track.step(branch, self.known.get(index), self.traces.get(index))
            shown = pictures_of(made)
            spent = time.perf_counter() - began
            info["ms"] = {"generate": round(1e3 * spent, 1)}
            seconds, pictures = seconds + spent, len(shown)
            with self.lock:
                self.progress.send(branch, info)
            self._engine.encoder.submit(self._finish, branch, info, made.latents, shown)
            track.keep_state_if_due(branch)
        if self.known.pop(index, None) is None:
            self._speed.append((int(pictures), seconds))
        elif not self.known:
            # Who uploads a run has seen it; prompts take effect after its end.
            self.settle()
            self.see(self.clock.start_s(index))
        self.publish_status()

    def _finish(self, branch: int, info: dict[str, Any], latents: Tensor, pictures: Pictures) -> None:
        """Encode, write and show a block; on the encoder's thread."""
        track, index = info["track"], info["index"]
        try:
            began = time.perf_counter()
            first = self.clock.first_picture(index)
            coded = encode_block(pictures, self._spec.pictures_per_second, first, index)
            strip = picture_strip(pictures)
            info["motion"], info["codec"] = movement(pictures), coded.codec
            info["likeness"] = likeness(pictures[-1], self._first_picture(track, branch, index, pictures))
            info["ms"]["encode"] = round(1e3 * (time.perf_counter() - began), 1)
            with self.lock:
                if not self.progress.is_wanted(branch, info):
                    return
                if index == self.record.branches[branch].fork_block:
                    self.store.write_init(track, branch, coded.init)
                self.store.write_block(track, branch, info, latents, coded.media, strip)
                self.progress.arrive(branch, info)
                self.hub.publish({name: value for name, value in info.items() if name != "trace"})
                header = self._header(track, branch, info)
                self.hub.send_media(header, coded.media, lambda: coded.init)
        except Exception as error:
            refusal = as_refusal(error)
            with self.lock:
                self.progress.drop(branch, index)
            self._engine.call(lambda: self.fail(refusal))

    def _first_picture(self, track: str, branch: int, index: int, pictures: Pictures) -> Picture:
        """Return the first picture of a track's video, which all branches share; on the encoder's thread."""
        if index == 0:
            self._firsts[track] = pictures[0]
        elif track not in self._firsts:
            init = self.store.read_init(track, branch)
            self._firsts[track] = decode_pictures(init, self.store.read(track, branch, 0, MEDIA))[0]
        return self._firsts[track]

    def _header(self, track: str, branch: int, info: dict[str, Any]) -> dict[str, Any]:
        about = {"block": info["index"], "codec": info["codec"], "start_s": info["start_s"]}
        return {"v": 1, "track": track, "branch": branch, **about}

    def fail(self, error: RecapError) -> None:
        """Stop generating and report why; `play` continues from what is on disk."""
        self.playing, self._broken, self.message = False, True, str(error)
        self.publish_status()

    @property
    def rate(self) -> float | None:
        """Return how many pictures are generated per second of work."""
        seconds = sum(spent for _, spent in self._speed)
        return round(sum(count for count, _ in self._speed) / seconds, 2) if seconds else None

    def status(self) -> dict[str, Any]:
        state = "failed" if self._broken else "playing" if self.playing else "paused"
        return {"v": 1, "type": "status", "state": state, "rate": self.rate, "message": self.message}

    def publish_status(self) -> None:
        with self.lock:
            self.hub.publish(self.status())

    # Watching

    def join(self, subscriber: Subscriber) -> dict[str, Any]:
        """Add a subscriber; returns the whole state so far, and sends the beginnings of the videos."""
        with self.lock:
            self.hub.join(subscriber)
            hello = self.hello()
            branch = self.record.current
            for track in self.tracks:
                if blocks := self.store.count(track, branch):
                    info = self.store.read_info(track, branch, blocks - 1)
                    header = self._header(track, branch, info)
                    self.hub.begin(subscriber, header, lambda t=track: self.store.read_init(t, branch))  # type: ignore[misc]
        return hello

    def hello(self) -> dict[str, Any]:
        """Return the whole state of the session, as plain data."""
        with self.lock:
            current = self.record.current
            blocks = {}
            for track in self.tracks:
                count = self.store.count(track, current)
                last = range(max(0, count - HELLO_BLOCKS), count)
                infos = (self.store.read_info(track, current, index) for index in last)
                blocks[track] = [{name: info.get(name) for name in LIGHT} for info in infos]
            return {"v": 1, "type": "hello", **self.summary(), "blocks": blocks, "status": self.status()}

    def summary(self) -> dict[str, Any]:
        """Return what a list of sessions says about this one."""
        with self.lock:
            return {
                "session": self.record.id,
                "created": self.record.created,
                "open": True,
                "tracks": {
                    name: {"memory": track.config.memory.name, "admission": track.config.admission.name}
                    for name, track in self.tracks.items()
                },
                "branches": [self.branch_shown(branch) for branch in self.record.branches.values()],
                **self._timeline(),
                "seconds": self.clock.start_s(self.store.count(MAIN, self.record.current)),
                "seen_s": self.clock.start_s(max(0, self.first_unseen - 1)),
                "playing": self.playing,
            }

    def branch_shown(self, branch: BranchRecord) -> dict[str, Any]:
        plain, blocks = branch.to_json(), self.store.count(MAIN, branch.id)
        return {"blocks": blocks, **{name: plain[name] for name in ("id", "parent", "fork_block", "batch")}}

    def _timeline(self) -> dict[str, Any]:
        """Return the prompts and changes of the current branch, and the settings and subjects that follow."""
        cues = [
            {"block": block, "start_s": self.clock.start_s(block), **asdict(cue)}
            for block, cue in sorted(self.branch.cues.items())
        ]
        return {
            "branch": self.record.current,
            "cues": cues,
            "changes": self.branch.changes,
            "settings": settings_of(self.tracks[MAIN].config, self.branch.changes, self.branch.rule),
            "cast": names_of(self.record.cast, self.branch.changes),
        }

    # Directing

    def see(self, second: float) -> None:
        """Note which second is on the screen."""
        with self.lock:
            self.progress.see(self.record.current, self.clock.block_at(min(second, 1e6)))

    @property
    def first_unseen(self) -> int:
        return self.progress.first_unseen(self.record.current)

    def direct(self, act: Callable[[int], list[dict[str, Any]]], at_block: int = 0) -> int:
        """Change the session at the first block that has not been seen, or at a later one; returns the block.

        `act` is called with that block when all sessions are at it, and returns the changes of memory that it made.
        If it refuses, nothing changes.
        """
        self.check_sound()
        target = max(self.first_unseen, at_block)
        here = min(target, self.next_block)
        branch = self.branch
        pending = any(change["at"] == here for change in branch.changes)
        kept = {name: track.session.snapshot() for name, track in self.tracks.items()}
        goes_back = here < self.next_block
        try:
            for track in self.tracks.values():
                if goes_back or pending:
                    track.go_back(here, branch)
            changes = act(target)
            for track in self.tracks.values():
                for at in {target, *track.session.cues}:
                    # A later prompt may name a subject that this change removes.
                    track.session.prompt_at(max(at, target))
        except BaseException:
            for name, track in self.tracks.items():
                track.session.restore(kept[name])
            raise
        if goes_back:
            self._drop(here)
        branch.cues = self.tracks[MAIN].session.cues
        branch.changes = [change for change in branch.changes if change["at"] <= here] + changes
        self.publish_timeline()
        return target

    def set_rule(self, rule: str) -> int:
        """Let another admission rule fill the bank again from all that was seen; returns the next block.

        A rule must see a video from its first picture on, so all blocks are read again.
        """
        self.check_sound()
        branch, block = self.branch, min(self.first_unseen, self.next_block)
        if any(change["kind"] in ("pin", "forget") for change in branch.changes):
            limit = "slots were pinned or forgotten, and another rule would fill others"
            raise refuse("admission", rule, limit, "branch from an earlier second, or begin another session")
        self.settle()
        goes_back = block < self.next_block
        before, kept = branch.rule, {name: track.session for name, track in self.tracks.items()}
        branch.rule = rule
        try:
            for track in self.tracks.values():
                track.build(branch.id, block)
        except BaseException:
            branch.rule = before
            for name, session in kept.items():
                self.tracks[name].session = session
            raise
        if goes_back:
            self._drop(block)
        branch.changes = [change for change in branch.changes if change["at"] <= block]
        self.publish_timeline()
        return block

    def check_sound(self) -> None:
        """Refuse to change a session that failed, or one that is not whole yet."""
        if self._broken:
            raise refuse("session", "failed", self.message, "press play first")
        if self.known:
            limit = f"block {self.next_block} of {max(self.known) + 1} of the uploaded run is being read"
            raise refuse("session", "being read", limit, "wait a moment")

    def _drop(self, first: int) -> None:
        """Delete the current branch's blocks from `first` on, on disk and at all subscribers."""
        with self.lock:
            branch = self.record.current
            self.progress.drop(branch, first)
            for track in self.tracks:
                self.store.drop_blocks(track, branch, first)
                self.hub.publish({"type": "dropped", "track": track, "branch": branch, "from_block": first})

    def publish_timeline(self) -> None:
        """Write the record, and send the timeline to all subscribers."""
        with self.lock:
            self.store.save_record()
            self.hub.publish({"type": "cue", **self._timeline()})

    def play(self) -> None:
        """Continue to generate; after a failure from what is on disk."""
        if self._broken:
            self.settle()
            self.begin()
        self.playing, self.message = True, ""
        self.publish_status()

    def pause(self) -> None:
        self.playing = False
        self.publish_status()

    def settle(self) -> None:
        """Wait until all blocks that the encoder has are on disk."""
        self._engine.encoder.submit(lambda: None).result()

    def close(self) -> None:
        """Stop, keep the present state and end all streams."""
        self.playing = False
        self.settle()
        if not self._broken:
            for track in self.tracks.values():
                track.keep_state(self.record.current)
        with self.lock:
            self.hub.close()

    def media(self, track: str, branch: int) -> tuple[bytes, list[bytes]]:
        """Return the beginning and all pieces of a video."""
        self.check_video(track, branch)
        with self.lock:
            blocks = range(self.store.count(track, branch))
            return self.store.read_init(track, branch), [
                self.store.read(track, branch, block, MEDIA) for block in blocks
            ]

    def check_video(self, track: str, branch: int) -> None:
        """Refuse a track or a branch that is not there."""
        if track not in self.tracks:
            raise refuse("track", track, f"there are {', '.join(self.tracks)}", "name one of them")
        if branch not in self.record.branches:
            raise refuse("branch", branch, f"there are {sorted(self.record.branches)}", "name one of them")
