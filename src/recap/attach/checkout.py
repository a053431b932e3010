"""All knowledge of upstream names: which code base a pipeline is of, and where its parts are.

Self-Forcing         keys are cached rotated, at absolute time; attention returns a tensor
Infinite-Forcing     keys are cached raw and rotated when read, at window-relative time
LongLive 1.0         as Self-Forcing; attention returns also what is to be cached, later, by the model
LongLive 1.0, infinity variant: as LongLive, keys as in Infinite-Forcing
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recap.errors import refuse

ATTENTION_PARTS = (
    "q",
    "k",
    "v",
    "o",
    "norm_q",
    "norm_k",
    "num_heads",
    "head_dim",
    "local_attn_size",
    "sink_size",
)


@dataclass(frozen=True, slots=True)
class Checkout:
    """The parts of an upstream pipeline that are read or patched."""

    name: str
    generator: Any  # the wrapper the pipeline calls; its `forward` sees latents, time and cache
    model: Any  # the transformer itself, out of any LoRA wrapping; holds the rotary table `freqs`
    attentions: tuple[Any, ...]  # one self-attention module per layer
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]  # its fused kernel: B N H D each
    vae: Any
    frame_tokens: int
    frames_per_block: int
    sink_frames: int
    rolls: bool  # whether its cache lets go of old frames; else it holds a whole video
    context_noise: float  # the time of the clean pass
    bakes_phases: bool  # keys are cached rotated, at absolute time
    defers_writes: bool  # attention hands back what is to be cached, and the model writes it


def find_checkout(pipeline: Any) -> Checkout:
    """The parts of a pipeline; what cannot be found is named."""
    generator = _uncompiled(_need(pipeline, "pipeline", "generator"))
    vae = _need(pipeline, "pipeline", "vae")
    for part in ("decode_to_pixel", "model"):
        _need(vae, "pipeline.vae", part)
    model = _unwrapped(_need(generator, "pipeline.generator", "model"))
    _need(model, "the transformer", "freqs")
    attentions = tuple(
        _uncompiled(_need(block, f"blocks[{layer}]", "self_attn")) for layer, block in enumerate(model.blocks)
    )
    if not attentions:
        raise refuse("blocks", [], "the transformer has no layers", "load the model before attaching")
    first = attentions[0]
    kind = type(first)
    if "wan_5b" in kind.__module__.split("."):
        limit = "LongLive 2.0 pins chunks and may quantise its cache, which this does not follow"
        raise refuse(
            "pipeline", kind.__module__, limit, "attach to Self-Forcing, Infinite-Forcing or LongLive 1.0"
        )
    for part in ATTENTION_PARTS:
        _need(first, f"{kind.__module__}.{kind.__qualname__}", part)
    namespace = vars(sys.modules[kind.__module__])
    if "attention" not in namespace:
        raise _missing(kind.__module__, "attention")
    name, bakes, defers = _recognise(kind, namespace)
    args = _need(pipeline, "pipeline", "args")
    return Checkout(
        name=name,
        generator=generator,
        model=model,
        attentions=attentions,
        attention=namespace["attention"],
        vae=vae,
        frame_tokens=int(_need(pipeline, "pipeline", "frame_seq_length")),
        frames_per_block=int(_need(pipeline, "pipeline", "num_frame_per_block")),
        sink_frames=int(first.sink_size),
        rolls=int(first.local_attn_size) != -1,
        context_noise=float(_need(args, "pipeline.args", "context_noise")),
        bakes_phases=bakes,
        defers_writes=defers,
    )


def check_generator(generator: Any) -> None:
    """Refuse a wrapper that hides the arguments: its calls would look like calls without a cache."""
    parameters = inspect.signature(generator.forward).parameters
    for parameter in ("noisy_image_or_video", "timestep", "kv_cache"):
        if parameter not in parameters:
            limit = f"its forward takes no {parameter!r}, as the generators of all code bases known here do"
            remedy = "attach to the generator itself, without a wrapper around it"
            raise refuse("pipeline.generator", type(generator).__qualname__, limit, remedy)


def _recognise(kind: type[Any], namespace: dict[str, Any]) -> tuple[str, bool, bool]:
    """Name, whether keys are cached rotated, whether writes are deferred."""
    parameters = inspect.signature(kind.forward).parameters
    for parameter in ("kv_cache", "current_start"):
        if parameter not in parameters:
            limit = f"its forward takes no {parameter!r}, as the cached attention of all code bases known here does"
            raise refuse(
                "attention", f"{kind.__module__}.{kind.__qualname__}", limit, "check the checkout's version"
            )
    if "sink_recache_after_switch" in parameters:
        infinite = "block_relativistic_rope" in namespace
        return ("longlive-1.0-infinity" if infinite else "longlive-1.0"), not infinite, True
    if "random" in namespace and "copy" in namespace:
        return "infinite-forcing", False, False
    return "self-forcing", True, False


def _unwrapped(model: Any) -> Any:
    """The transformer inside LoRA wrapping, where `blocks` is reached through base_model.model."""
    model = _uncompiled(model)
    if "blocks" not in _names(model) and hasattr(model, "base_model"):
        model = _need(_need(model, "generator.model", "base_model"), "generator.model.base_model", "model")
    _need(model, "generator.model (also inside base_model.model)", "blocks")
    return _uncompiled(model)


def _uncompiled(module: Any) -> Any:
    """What `torch.compile(module)` wrapped: only there does `forward` have upstream's signature."""
    return vars(module).get("_modules", {}).get("_orig_mod", module)


def _names(module: Any) -> set[str]:
    """Attributes an object has of its own: LoRA wrappers answer for those of what they wrap."""
    return {*vars(module), *vars(module).get("_modules", ())}


def _need(owner: Any, path: str, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _missing(path, name, type(owner).__qualname__) from error


def _missing(path: str, name: str, kind: str = "module") -> ValueError:
    limit = f"no attribute {name!r} was found on {path} ({kind})"
    remedy = "pass the inference pipeline of Self-Forcing, Infinite-Forcing or LongLive 1.0, models loaded"
    return refuse("pipeline", kind, limit, remedy)
