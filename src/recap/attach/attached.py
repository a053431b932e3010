"""This module holds what attaching to any code base needs: hooks that come off again, and what a user gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from recap.config import Choice, RunConfig
from recap.contracts import MemoryConfig, MemoryPolicy
from recap.errors import refuse
from recap.io.report import each_once
from recap.io.trace import BlockTrace
from recap.run import build_memory
from recap.types import BackboneSpec, Block, GeneratedBlock

ABSENT = object()
# Locked while hooks are put on or taken off: between a check and a change nobody else may change anything. It can be
# taken twice, because the garbage collector may take off the hooks of a forgotten `with` at any time.
PATCHING = threading.RLock()
# (id of an object's attributes, name) of everything that is patched at present.
_PATCHED: set[tuple[int, str]] = set()

BuildMemory = Callable[[BackboneSpec, str], MemoryPolicy]
"""Builds a fresh memory for a model of that spec on that device."""


def patch(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Set an attribute of an instance to what `wrap` makes of its present value; `undo` puts that value back.

    Classes and modules are never touched. Nothing is patched twice, so it does not matter who is undone first.
    """
    # Through the instance's dict, past any __setattr__: what was there returns as the same object.
    own = vars(owner)
    key = (id(own), name)
    if key in _PATCHED:
        limit = "a memory is attached to it already"
        raise refuse("pipeline", type(owner).__qualname__, limit, "leave the other `with` first")
    before, own[name] = own.get(name, ABSENT), wrap(getattr(owner, name))
    _PATCHED.add(key)

    def restore() -> None:
        _PATCHED.remove(key)
        if before is ABSENT:
            del own[name]
        else:
            own[name] = before

    undo.callback(restore)


class OneThread:
    """Lets one thread at a time generate: the one that began the latest video.

    A memory follows one video. Calls of two videos that alternate would be taken for calls of one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._calling = False

    def is_this(self) -> bool:
        """Tell whether the calling thread may generate."""
        return self._thread in (None, threading.get_ident())

    def begin(self) -> None:
        """Begin a video in this thread; refuses while a call of another thread's video is in progress."""
        with self._lock:
            if self._calling:
                self._refuse_others()
            self._thread = threading.get_ident()

    def enter(self) -> None:
        """Begin a call; refuses if another thread began a video since."""
        with self._lock:
            self._refuse_others()
            self._calling = True

    def leave(self) -> bool:
        """End a call, also one that was refused; returns whether it was this thread's to end."""
        with self._lock:
            if self.is_this():
                self._calling = False
            return self.is_this()

    def _refuse_others(self) -> None:
        if not self.is_this():
            limit = "another thread generates through this pipeline"
            remedy = "generate one video at a time, or attach to a second pipeline"
            raise refuse("thread", threading.current_thread().name, limit, remedy)


@dataclass(slots=True)
class Attached:
    """Tells the user of a `with attach(...)` which code base was recognised, and what happened so far.

    `spec` has the sizes found, window and phases among them. `memory` is that of the video in progress or last
    generated, and `videos` counts those begun.
    """

    checkout: str
    trace: list[BlockTrace] = field(default_factory=list)
    spec: BackboneSpec | None = None
    memory: MemoryPolicy | None = None
    videos: int = 0

    def remember(self, spec: BackboneSpec, memory: MemoryPolicy) -> None:
        """Take a fresh memory for the video in progress."""
        second = Block(1, spec.frames_per_block, spec.frames_per_block, ("",))
        if memory.noise_block(second) != second.index:
            limit = "it wants every block to start from the same noise, which the pipeline makes by itself"
            raise refuse("memory", type(memory).__name__, limit, "switch that setting off")
        self.spec, self.memory = spec, memory

    def record(self, made: GeneratedBlock) -> None:
        """Add a finished block to the trace."""
        self.trace.append(BlockTrace.of(made, video=self.videos - 1))


def memory_builder(
    memory: str | Mapping[str, Any] | MemoryConfig, admission: str | Mapping[str, Any], flow: str
) -> BuildMemory:
    """Return what makes the memory of each video, by the names, settings and refusals of a run."""
    settings = {
        "shots": [{"prompt": "", "seconds": 1}],
        "memory": memory if isinstance(memory, str | Mapping) else Choice(type(memory).__name__, memory),
        "admission": admission,
        "flow": flow,
    }
    config = RunConfig.from_dict(settings)
    notice = each_once(print)
    # The device is known only at a video's start: a pipeline may be moved after it was attached to.
    return lambda spec, device: build_memory(replace(config, device=device), spec, notice)
