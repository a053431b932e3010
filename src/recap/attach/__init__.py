"""attach: the memories of this package in a checkout of somebody else's model, for the length of a `with`.

Nothing of the package is imported until it is used: the public name is here, what it needs in the other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from recap.attach.session import Attached
    from recap.contracts import Decoder, MemoryConfig


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
    stage_reinforcement: Sequence[float] = (),
) -> AbstractContextManager[Attached]:
    """Let a pipeline remember by `memory` while the `with` lasts.

    The pipeline is one of Self-Forcing, Infinite-Forcing or LongLive 1.0, or diffusers' HeliosPipeline or
    HeliosPyramidPipeline.

    `memory`, `admission` and `flow` are named and set as in a run; `memory` may also be a config object.
    `phases`: "window" counts time from the window's start, as the paper does; "released" as the checkout itself.
    `window_frames`: sink, prior and current together; by default what the checkout's own cache holds.
    `decoder` opens a fresh stream from latents to pictures per video; by default the pipeline's own autoencoder.
    `reuse_pictures`: hand the pictures decoded on the way to the pipeline's last step, which would decode them
    again.
    `stage_reinforcement`, Helios only: lambda of every stage of its pyramid, the coarsest first, instead of the
    memory's one. Helios in turn has phases, a window and a decoder of its own.
    """
    from recap.attach.helios import attached_helios, find_helios
    from recap.attach.wan import attached
    from recap.errors import refuse

    if find_helios(pipeline) is not None:
        options = {"phases": phases != "window", "window_frames": window_frames, "decoder": decoder}
        for option, chosen in options.items():
            if chosen:
                limit = "Helios has its own, which cannot be chosen"
                raise refuse(option, locals()[option], limit, "leave it out")
        return attached_helios(
            pipeline, memory, admission=admission, flow=flow, stage_reinforcement=stage_reinforcement
        )
    if stage_reinforcement:
        limit = "only Helios generates in stages"
        raise refuse("stage_reinforcement", stage_reinforcement, limit, "set the memory's reinforcement")
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
