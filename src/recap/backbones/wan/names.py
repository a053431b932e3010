"""This module translates the names of the Wan transformer's tensors: to ours, the original ones, and to diffusers'.

Nothing is reshaped or transposed on the way. diffusers numbers the norms of a block in order of use, so that the
original `norm3` is its `norm2`; the other two norms have no parameters.
"""

from __future__ import annotations

from recap.io.weights import rename

TO_DIFFUSERS = (
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.([qkv])\.", r".to_\1."),
    (r"\.o\.", ".to_out.0."),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)
"""Maps our names to those of diffusers' `WanTransformer3DModel`."""

ONLY_DIFFUSERS = "condition_embedder."
"""Names that start so show that a file is diffusers'."""

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"})
"""Sharding, recomputation, compilation and data parallelism put these components into a name."""


def clean(name: str) -> str:
    """Return a name without wrappers and without the one leading `model.` of the trainers."""
    bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return bare.removeprefix("model.")


def to_diffusers(name: str) -> str:
    """Return what diffusers calls a tensor of ours."""
    return rename(name, TO_DIFFUSERS)
