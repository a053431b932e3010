"""Names of the Wan transformer's tensors: the original ones, which are ours, and those of diffusers.

One table serves both directions. Nothing is reshaped or transposed on the way. diffusers numbers the norms of a
block in order of use, so that the original `norm3` is its `norm2`; the other two norms have no parameters.
"""

from __future__ import annotations

import re

OUTSIDE = (
    ("patch_embedding", "patch_embedding"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.modulation", "scale_shift_table"),
    ("head.head", "proj_out"),
)
"""(ours, diffusers) outside the blocks; a table of its own, as `scale_shift_table` means another tensor there."""

IN_BLOCK = (
    ("modulation", "scale_shift_table"),
    *((f"self_attn.{name}", f"attn1.to_{name}") for name in "qkv"),
    ("self_attn.o", "attn1.to_out.0"),
    ("self_attn.norm_q", "attn1.norm_q"),
    ("self_attn.norm_k", "attn1.norm_k"),
    *((f"cross_attn.{name}", f"attn2.to_{name}") for name in "qkv"),
    ("cross_attn.o", "attn2.to_out.0"),
    ("cross_attn.norm_q", "attn2.norm_q"),
    ("cross_attn.norm_k", "attn2.norm_k"),
    ("norm3", "norm2"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
)
"""(ours, diffusers) after `blocks.<i>.`."""

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"})
"""Components that sharding, recomputation, compilation and data parallelism put into a name."""

_NAME = re.compile(r"(?P<block>blocks\.\d+\.)?(?P<module>.*?)(?P<kind>\.weight|\.bias)?")

_Tables = tuple[dict[str, str], dict[str, str]]
_THEIRS: _Tables = (dict(OUTSIDE), dict(IN_BLOCK))
_OURS: _Tables = ({theirs: ours for ours, theirs in OUTSIDE}, {theirs: ours for ours, theirs in IN_BLOCK})


def clean(name: str) -> str:
    """A name without wrappers and without the one leading `model.` of the trainers."""
    bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return bare.removeprefix("model.")


def is_diffusers(name: str) -> bool:
    """Whether only diffusers uses this name."""
    return to_ours(name) is not None and to_diffusers(name) is None


def to_ours(name: str) -> str | None:
    """Our name of a tensor that diffusers calls so, if there is one."""
    return _translated(name, _OURS)


def to_diffusers(name: str) -> str | None:
    """What diffusers calls a tensor of ours, if there is one of that name."""
    return _translated(name, _THEIRS)


def _translated(name: str, tables: _Tables) -> str | None:
    parts = _NAME.fullmatch(name)
    if parts is None:  # a line break in it
        return None
    block, module, kind = parts["block"] or "", parts["module"], parts["kind"] or ""
    translated = tables[bool(block)].get(module)
    return None if translated is None else f"{block}{translated}{kind}"
