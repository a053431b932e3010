"""attach: the memories of this package in a checkout of somebody else's model, for the length of a `with`.

Nothing of the package is imported until it is used: the public name lives here, what it needs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from recap.attach.session import Attached
    from recap.contracts import Decoder
    from recap.registry import MemoryConfig


def attach(
    pipeline: Any,
    memory: str | Mapping[str, Any] | MemoryConfig = "recap",
    *,
    phases: Literal["window", "released"] = "window",
    window_frames: int | None = None,
    admission: str | Mapping[str, Any] = "flow",
    flow: str = "auto",
    decoder: Callable[[], Decoder] | None = None,
    reuse_pictures: bool = True,
) -> AbstractContextManager[Attached]:
    """Let a Self-Forcing, Infinite-Forcing or LongLive 1.0 pipeline remember by `memory` while the `with` lasts.

    `memory`, `admission` and `flow` are named and set as in a run; `memory` may also be a config object.
    `phases`: "window" counts time from the window's start, as the paper does; "released" as the checkout itself.
    `window_frames`: sink, prior and current together; by default what the checkout's own cache holds.
    `decoder` opens a fresh stream from latents to pictures per video; by default the pipeline's own autoencoder.
    `reuse_pictures`: hand the pictures decoded on the way to the pipeline's last step, which would decode them
    again.
    """
    from recap.attach.wan import attached

    return attached(
        pipeline,
        memory,
        phases=phases,
        window_frames=window_frames,
        admission=admission,
        flow=flow,
        decoder=decoder,
        reuse_pictures=reuse_pictures,
    )
