"""Hooks on and off: an upstream pipeline of the Wan family, patched on its instances for the length of a `with`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from recap.attach.checkout import check_generator, find_checkout
from recap.attach.compiling import skipped, untraced
from recap.attach.pictures import Pictures
from recap.attach.session import Attached, BuildMemory, Session
from recap.config import Choice, RunConfig
from recap.contracts import Decoder, MemoryConfig
from recap.errors import refuse, unknown_name
from recap.io.report import each_once
from recap.run import build_memory

ABSENT = object()
MARK = "recap_hook"
"""Set on the generator's hook, so that it is recognised when met again."""


class Patches:
    """Attributes set on instances, and the way back: classes and modules are never touched."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # Through the instance's dict, past any __setattr__: what was there returns as the same object.
        own = vars(owner)
        self._before.append((own, name, own.get(name, ABSENT)))
        own[name] = value

    def undo(self) -> None:
        for own, name, value in reversed(self._before):
            if value is ABSENT:
                del own[name]
            else:
                own[name] = value
        self._before = []


@contextmanager
def attached(
    pipeline: Any,
    memory: str | Mapping[str, Any] | MemoryConfig,
    *,
    phases: Literal["window", "released"],
    window_frames: int | None,
    admission: str | Mapping[str, Any],
    flow: str,
    decoder: Callable[[], Decoder] | None,
    reuse_pictures: bool,
) -> Iterator[Attached]:
    if phases not in ("window", "released"):
        raise unknown_name("phases", phases, ("window", "released"))
    checkout = find_checkout(pipeline)
    if window_frames is not None and window_frames < checkout.frames_per_block:
        limit = f"a block of {checkout.frames_per_block} frames must fit into it"
        raise refuse("window_frames", window_frames, limit, "the paper's window is 6 frames")
    if hasattr(vars(checkout.generator).get("forward"), MARK):
        limit = "a memory is attached to it already"
        raise refuse("pipeline", type(pipeline).__qualname__, limit, "leave the other `with` first")
    check_generator(checkout.generator)
    build = memory_builder(memory, admission, flow)
    pictures = Pictures(checkout.vae, decoder, keep=reuse_pictures)
    session = Session(checkout, build, pictures, phases=phases, window_frames=window_frames)
    patches = Patches()
    try:
        patches.set(checkout.generator, "forward", _generator_hook(session, checkout.generator.forward))
        for layer, attention in enumerate(checkout.attentions):
            patches.set(attention, "forward", _attention_hook(session, layer, attention.forward))
        if reuse_pictures and decoder is None:
            patches.set(checkout.vae, "decode_to_pixel", pictures.decode_to_pixel)
        yield session.attached
    finally:
        patches.undo()


def _generator_hook(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    bind = untraced(signature.bind)
    begin, end, leave = untraced(session.begin), untraced(session.end), untraced(session.leave)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = bind(*args, **kwargs).arguments
        if call.get("kv_cache") is None:
            return original(*args, **kwargs)
        latents, start = call["noisy_image_or_video"], call.get("current_start") or 0
        with torch.no_grad():
            try:
                begin(latents, call["timestep"], call["kv_cache"], start)
                result = original(*args, **kwargs)
                end(latents)
            finally:
                leave()
        return result

    hook = skipped(forward)
    vars(hook)[MARK] = True
    return hook


def _attention_hook(session: Session, layer: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        return session.attend(layer, lambda: original(x, *args, **kwargs), x)

    return untraced(forward)


def memory_builder(
    memory: str | Mapping[str, Any] | MemoryConfig, admission: str | Mapping[str, Any], flow: str
) -> BuildMemory:
    """How to make the memory of each video, by the names, settings and refusals of a run; it needs no script."""
    named = isinstance(memory, (str, Mapping))
    settings = {
        "shots": [{"prompt": "", "seconds": 1}],
        "memory": memory if named else Choice(type(memory).__name__, memory),
        "admission": admission,
        "flow": flow,
    }
    config = RunConfig.from_dict(settings)
    notice = each_once(print)
    # The device only at a video's start: a pipeline may be moved after it was attached to.
    return lambda spec, device: build_memory(replace(config, device=device), spec, notice)
