"""Puts the memories of this package into somebody else's pipeline, for the length of a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch.distributed as dist

from recap.attach.attached import PATCHING, Attached, memory_builder
from recap.attach.checkout import find_checkout
from recap.attach.helios import HeliosSession, find_helios
from recap.attach.session import AttachedSession, Pictures
from recap.contracts import Decoder, MemoryConfig
from recap.errors import refuse, unknown_name

PHASES = ("window", "released")


@contextmanager
def attach(
    pipeline: Any,
    memory: str | Mapping[str, Any] | MemoryConfig = "recap",
    *,
    phases: Literal["window", "released"] = "window",
    window_frames: int | None = None,
    admission: str | Mapping[str, Any] = "auto",
    flow: str = "auto",
    decoder: Callable[[], Decoder] | None = None,
    reuse_pictures: bool = True,
    stage_reinforcement: Sequence[float] = (),
) -> Iterator[Attached]:
    """Let a pipeline remember by `memory` while the `with` lasts.

    The pipeline is one of Self-Forcing, Infinite-Forcing or LongLive 1.0, or diffusers' HeliosPipeline or
    HeliosPyramidPipeline. It generates one video at a time, in one thread.

    `memory`, `admission` and `flow` are named and set as in a run; `memory` may also be a config object, and the
    admission "auto" is the memory's usual one.
    `phases`: "window" counts time from the window's start, as the paper does; "released" as the checkout itself.
    `window_frames`: sink, prior and current together; by default what the checkout's own cache holds.
    `decoder` opens a fresh stream from latents to pictures per video; by default the pipeline's own autoencoder.
    `reuse_pictures`: pass the pictures decoded on the way to the pipeline's last step, which would decode them
    again.
    `stage_reinforcement`, Helios only: lambda of every stage of its pyramid, the coarsest first, instead of the
    memory's one. Helios in turn has phases, a window and a decoder of its own.
    """
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if processes > 1:
        limit = "an attached pipeline keeps all heads and tokens in one process"
        remedy = "start one process for each video, or generate one video in several by `recap generate`"
        raise refuse("number of processes", processes, limit, remedy)
    helios = find_helios(pipeline)
    if helios is not None:
        chosen = {"phases": phases, "window_frames": window_frames, "decoder": decoder}
        for option, value in chosen.items():
            if value not in (None, "window"):
                raise refuse(option, value, "Helios has its own, which cannot be chosen", "leave it out")
    elif phases not in PHASES:
        raise unknown_name("phases", phases, PHASES)
    elif stage_reinforcement:
        limit = "only Helios generates in stages"
        raise refuse("stage_reinforcement", stage_reinforcement, limit, "set the memory's reinforcement")
    build = memory_builder(memory, admission, flow)
    undo = ExitStack()
    try:
        with PATCHING:
            session: AttachedSession | HeliosSession
            if helios is not None:
                session = HeliosSession(helios, pipeline, build, stage_reinforcement)
            else:
                checkout = find_checkout(pipeline)
                pictures = Pictures(checkout.vae, decoder, keep=reuse_pictures)
                session = AttachedSession(checkout, build, pictures, phases == "released", window_frames)
            session.hook(undo)
        yield session.attached
    finally:
        with PATCHING:
            undo.close()
