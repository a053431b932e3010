"""The studio has one model, the sessions that are open on it, and the folder in which everything is stored."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from threading import RLock
from typing import Any

from recap.config import AUTO, RunConfig
from recap.contracts import Backbone
from recap.errors import RecapError, refuse, unknown_name
from recap.fast.fitting import fit_card
from recap.io.cast import write_cast
from recap.io.files import alone_in
from recap.io.record import VERSION
from recap.io.report import SILENT, Notice
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES
from recap.run import build_backbone
from recap.session import Session
from recap.session.batcher import Batcher
from recap.session.values import Cue
from recap.studio import messages
from recap.studio.directing import carry_out, check_prompt
from recap.studio.engine import Engine, log
from recap.studio.exchange import UploadedRun, read_run
from recap.studio.live import LiveSession
from recap.studio.settings import StudioSettings
from recap.studio.shelf import Shelf, subject_of
from recap.studio.store import BranchRecord, SessionRecord, SessionStore, StudioFolder, new_id, no_session
from recap.studio.track import Clock, Track
from recap.studio.videos import VideoQueue

BUSY = ("--folder", "another studio is working in it", "end that one, or choose another folder")
TRIED_PROMPT = "a fox on a beach by day"
"""Every model can read it."""
FIRST_SHOT_S = 1.0
"""A session has no end; its config needs a shot of some length."""


class Studio:
    """Opens, keeps and closes sessions; safe to call from any thread."""

    def __init__(
        self,
        settings: StudioSettings,
        folder: StudioFolder | None = None,
        shelf: Shelf | None = None,
        notice: Notice = SILENT.notice,
    ) -> None:
        """Open a studio; `folder` and `shelf` replace those in the folder of the settings."""
        # What can be refused before the model is loaded is refused here.
        plain_config(settings)
        self.settings = settings
        self._notice = notice
        # Whether the model took the readable path.
        self._eager = False
        self.folder = folder or StudioFolder(settings.folder, settings.limits.disk_bytes)
        # Until this studio is closed, or its process is gone.
        self._alone = ExitStack()
        self._alone.enter_context(alone_in(self.folder.root, *BUSY))
        self.shelf = shelf or Shelf(self.folder.root / "casts", settings.limits.casts)
        self._batcher = Batcher(settings.batch)
        self.engine = Engine(self._batcher)
        self.sessions: dict[str, LiveSession] = {}
        # Sessions that are being built.
        self._opening: set[str] = set()
        self._lock = RLock()
        self._backbone: Backbone | None = None
        self.videos = VideoQueue(
            self.folder.root / "videos", self.engine, settings.limits, self._video_session
        )
        self.engine.call(lambda: self.engine.add(self.videos))
        # The model loads while the browser loads the page.
        self.engine.call(self._load)

    def _load(self) -> Backbone:
        """Return the model; the cause of a failure may be gone since, so every call tries again."""
        if self._backbone is None:
            config = plain_config(self.settings)
            # Sessions of a batch share a forward; what further ones keep on the card is not planned.
            rows = tuple(range(self.settings.batch))
            config = fit_card(dataclasses.replace(config, seeds=rows), self._notice)
            found = build_backbone(config, self._notice)
            self._eager = config.eager
            if self.settings.batch > 1:
                tried = make_config(self.settings, messages.NewSession(prompt=TRIED_PROMPT))
                tried = dataclasses.replace(tried, eager=self._eager)
                self._batcher.check(Session(tried, backbone=found, reporter=SILENT, batcher=self._batcher))
            self._backbone = found
        return self._backbone

    def save_subject(self, live: LiveSession, asked: messages.NewSubject) -> dict[str, Any]:
        """Keep a subject of a session on the shelf."""
        with live.lock:
            subject = subject_of(live, asked)
        self.folder.check_room()
        return self.shelf.save(subject)

    def about(self) -> dict[str, Any]:
        """Return what a client needs first; waits for the model."""
        spec = self.engine.call(self._load).result().spec
        clock, size = Clock(spec), spec.picture_size
        rate = spec.pictures_per_second
        return {
            "v": 1,
            "version": VERSION,
            "backbone": spec.name,
            "precision": self.settings.precision,
            "memories": sorted(MEMORIES),
            "admissions": sorted(ADMISSIONS),
            "picture": {"width": size[1], "height": size[0], "per_second": rate},
            "grid": {"rows": spec.grid[0], "columns": spec.grid[1], "token_pixels": spec.token_pixels},
            "block_s": clock.start_s(2) - clock.start_s(1),
            "lead_blocks": self.settings.lead_blocks,
            "limits": dataclasses.asdict(self.settings.limits),
        }

    # Sessions

    def create(self, new: messages.NewSession) -> LiveSession:
        """Begin a session."""
        check_words(new.prompt)
        tracks = {messages.MAIN: make_config(self.settings, new)}
        if new.second_memory:
            tracks[messages.SECOND] = make_config(self.settings, new, new.second_memory)
        self.folder.check_room()
        self.check_number()
        plain = {name: config.to_dict() for name, config in tracks.items()}
        record = SessionRecord(new_id(), time.time(), plain, check_cast(self.shelf, new.cast))
        record.branches[0] = BranchRecord(0, cues={0: Cue(new.prompt)})
        return self._start(record, None)

    def upload(self, data: bytes) -> LiveSession:
        """Open a zipped run folder as a session; its blocks are read, and generation continues after them."""
        self.folder.check_room()
        spec = self.engine.call(self._load).result().spec
        run = read_run(data, self.settings.limits.upload_bytes, self.settings.backbone, spec)
        check_model(run.config, self.settings)
        self.check_number()
        plain = {messages.MAIN: run.config.to_dict()}
        record = SessionRecord(new_id(), time.time(), plain, [subject.name for subject in run.subjects])
        record.branches[0] = BranchRecord(0, cues=run.cues)
        return self._start(record, None, run)

    def create_video(self, asked: messages.NewVideo) -> dict[str, Any]:
        """Queue a video for a program."""
        check_video(self.settings, self.shelf, asked)
        self.folder.check_room()
        return self.videos.create(asked)

    def _video_session(self, asked: messages.NewVideo, folder: Path) -> Session:
        """Make the session that generates a video; on the model's thread."""
        for name in asked.cast or ():
            self.shelf.copy(name, folder / f"{name}.cast")
        cast = tuple(str(folder / f"{name}.cast") for name in asked.cast or ())
        backbone = self._load()
        config = dataclasses.replace(make_config(self.settings, asked), cast=cast, eager=self._eager)
        return Session(
            config,
            backbone=backbone,
            reporter=SILENT,
            history_s=0.0,
            states_bytes=0,
            batcher=self._batcher,
        )

    def check_number(self) -> None:
        """Refuse another session where the limit of stored ones is reached."""
        most = self.settings.limits.kept_sessions
        if (kept := len(self.folder.ids())) >= most:
            raise refuse("sessions", kept, f"at most {most} are kept", "delete one of them")

    def open(self, name: str) -> LiveSession:
        """Open a session that is on disk; one that is open already is returned."""
        with self._lock:
            if name in self.sessions:
                return self.sessions[name]
        store = self.folder.load(name)
        store.clean()
        return self._start(store.record, store)

    def _start(
        self, record: SessionRecord, store: SessionStore | None, run: UploadedRun | None = None
    ) -> LiveSession:
        """Build a session; others stay usable meanwhile, so nothing is locked but the number of sessions."""
        most = self.settings.limits.open_sessions
        with self._lock:
            if record.id in self._opening:
                raise refuse("session", record.id, "is being opened", "ask again in a moment")
            if (count := len(self.sessions) + len(self._opening)) >= most:
                limit = f"{count} sessions are open, and at most {most} may be"
                raise refuse("sessions", count, limit, "close one of them")
            self._opening.add(record.id)
        fresh = store is None
        try:
            store = self.folder.new(record) if store is None else store
            if run is not None:
                for subject in run.subjects:
                    write_cast(store.folder / "casts" / f"{subject.name}.cast", [subject])
            elif fresh:
                for name in record.cast:
                    self.shelf.copy(name, store.folder / "casts" / f"{name}.cast")
            whole = store
            live = self.engine.call(lambda: self._begin(whole, run)).result()
            with self._lock:
                self.sessions[record.id] = live
            return live
        except BaseException:
            if fresh:
                self.folder.delete(record.id)
            raise
        finally:
            with self._lock:
                self._opening.discard(record.id)

    def _begin(self, store: SessionStore, run: UploadedRun | None) -> LiveSession:
        """Build the tracks of a session; on the model's thread."""
        backbone = self._load()
        cast = tuple(str(store.folder / "casts" / f"{name}.cast") for name in store.record.cast)
        tracks = []
        for name, plain in store.record.tracks.items():
            config = dataclasses.replace(RunConfig.from_dict(plain), eager=self._eager)
            check_model(config, self.settings)
            if config.memory.settings.keeps_bank:
                config = dataclasses.replace(config, cast=cast)
            elif cast and name == messages.MAIN:
                limit = f"the memory {config.memory.name} has no bank next to which a cast could be pinned"
                raise refuse("cast", store.record.cast, limit, "choose recap")
            tracks.append(Track(name, config, backbone, store, SILENT, self._batcher))
        live = LiveSession(store, tracks, self.engine, self.settings, self.folder.check_room)
        if run is not None:
            live.known, live.traces = dict(run.latents), run.traces
        live.begin()
        if live.message:
            log.warning("session %s: %s", live.record.id, live.message)
        store.save_record()
        self.engine.add(live)
        return live

    def find(self, name: str) -> LiveSession:
        """Return an open session."""
        with self._lock:
            if name in self.sessions:
                return self.sessions[name]
        if name in self.folder.ids():
            raise refuse("session", name, "is not open", f"POST /v1/sessions/{name}/open first")
        raise no_session(name)

    def list(self) -> list[dict[str, Any]]:
        """Return all sessions, open ones and those that can be opened."""
        found = []
        for name in self.folder.ids():
            with self._lock:
                live = self.sessions.get(name)
            if live is not None:
                found.append(live.summary())
                continue
            try:
                found.append(self.folder.load(name).record.summary())
            except RecapError as error:
                found.append({"session": name, "open": False, "message": str(error)})
        return found

    def command(self, live: LiveSession, command: messages.Command) -> Future[dict[str, Any]]:
        """Execute a client's command between two blocks."""
        return self.engine.call(lambda: carry_out(live, command, self.settings.limits, self.shelf))

    def close_session(self, name: str) -> None:
        """Close a session, which stays on disk."""
        with self._lock:
            live = self.sessions.pop(name, None)
        if live is not None:
            self.engine.call(lambda: self._end(live)).result()

    def _end(self, live: LiveSession) -> None:
        self.engine.remove(live)
        live.close()

    def delete(self, name: str) -> None:
        """Close a session and delete its files."""
        if name not in self.folder.ids():
            raise no_session(name)
        self.close_session(name)
        self.folder.delete(name)

    def close(self) -> None:
        """Close all sessions and end the threads."""
        for name in list(self.sessions):
            self.close_session(name)
        self.engine.close()
        self._alone.close()


def make_config(settings: StudioSettings, new: messages.NewWork, memory: str = "") -> RunConfig:
    """Make the config of a session or a video; names are those of the tables, never code."""
    memory = memory or new.memory
    for field, name, table in (
        ("memory", memory, MEMORIES),
        ("admission", new.admission, (AUTO.name, *ADMISSIONS)),
    ):
        if name not in table:
            raise unknown_name(field, name, table)
    check_prompt(new.prompt, settings.limits)
    if not 0 <= new.seed < 2**63:
        raise refuse("seed", new.seed, "must be 0 to 2^63 - 1", "0 is as good as any")
    fields = {field.name for field in dataclasses.fields(MEMORIES[memory])}
    wanted = {"reinforcement": new.reinforcement, "capacity_frames": new.capacity_frames}
    own = {name: value for name, value in wanted.items() if value is not None and name in fields}
    return RunConfig.from_dict(
        {
            "shots": [{"prompt": new.prompt, "seconds": getattr(new, "seconds", FIRST_SHOT_S)}],
            "backbone": {"name": settings.backbone, **({"loras": settings.loras} if settings.loras else {})},
            "memory": {"name": memory, **own},
            "admission": new.admission,
            "flow": settings.flow,
            "device": settings.device,
            "precision": settings.precision,
            "low_memory": settings.low_memory,
            "seeds": [new.seed],
        }
    )


def plain_config(settings: StudioSettings) -> RunConfig:
    """Make a config of a studio's model; refuses settings that no session could have."""
    if settings.backbone not in BACKBONES:
        raise unknown_name("backbone", settings.backbone, BACKBONES)
    return make_config(settings, messages.NewSession(prompt=""))


def check_model(config: RunConfig, settings: StudioSettings) -> None:
    """Refuse a session that was begun with another model, precision or LoRA: it would continue as another video."""
    for field in ("backbone", "precision"):
        found = getattr(config, field)
        began = found if isinstance(found, str) else found.name
        if began != getattr(settings, field):
            limit = f"it was begun so, and this studio has {getattr(settings, field)}"
            raise refuse(field, began, limit, f"start the studio with --{field} {began}")
    loras = tuple(getattr(config.backbone.settings, "loras", ()))
    if loras != settings.loras:
        own = " ".join(f"--lora {shlex.quote(each)}" for each in loras) or "no --lora"
        # Paths of this studio's are not for its clients.
        raise refuse(
            "lora", list(loras), "it was begun so, and this studio has others", f"start the studio with {own}"
        )


def check_words(prompt: str) -> None:
    """Refuse a prompt without words."""
    if not prompt.strip():
        raise refuse("prompt", prompt, "must be text", "say what the picture shows")


def check_cast(shelf: Shelf, names: Sequence[str] | None) -> list[str]:
    """Refuse subjects that are not on the shelf, or are named twice."""
    found = list(names or ())
    for name in found:
        shelf.path(name)
    if len(set(found)) < len(found):
        raise refuse("cast", found, "a subject is named twice", "name each once")
    return found


def check_video(settings: StudioSettings, shelf: Shelf, asked: messages.NewVideo) -> None:
    """Refuse a video that could not be generated."""
    check_words(asked.prompt)
    make_config(settings, asked)
    check_cast(shelf, asked.cast)
