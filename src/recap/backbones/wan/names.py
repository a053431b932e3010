"""This module translates the names of the Wan transformer's tensors: to ours, the original ones, and to diffusers'.

It also knows how four kinds of tools name the tensors of a LoRA.

Nothing is reshaped or transposed on the way. diffusers numbers the norms of a block in order of use, so that the
original `norm3` is its `norm2`; the other two norms have no parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

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


DOWN, UP, ALPHA = "lora_A.weight", "lora_B.weight", "alpha"
"""The tensors of one changed layer, in peft's words: it goes down to the rank, then up again."""

LORA_LAYOUTS: dict[str, Callable[[str], str]] = {
    "native": lambda layer: layer,
    "diffusers": lambda layer: f"transformer.{to_diffusers(f'{layer}.').removesuffix('.')}",
    "ComfyUI": lambda layer: f"diffusion_model.{layer}",
    "kohya": lambda layer: f"lora_unet_{layer.replace('.', '_')}",
}
"""What each kind of tool calls a layer of ours in the file of a LoRA; musubi's names are kohya's."""

# peft puts the adapter's name into the state dict of a live model, older diffusers a dot for the underscore.
_KIND = re.compile(r"\.(?:lora[._](A|B|down|up)(?:\.[^.]+)?\.weight|alpha)$")

_UNREAD = re.compile(r"\.(?:diff|diff_b|dora_scale|lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?)$")
"""What a LoRA may have next to its factors: changes that are added whole, of norms and biases, and DoRA's scales."""


def is_unread_change(name: str) -> bool:
    """Tell whether a tensor is a change of a kind that is not read."""
    return _UNREAD.search(name) is not None


def lora_layers(weights: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Map every name that a layer can have in a LoRA to its weight and the layout that names it so."""
    layers = {}
    for weight in weights:
        for layout, spell in LORA_LAYOUTS.items():
            name = spell(weight.removesuffix(".weight"))
            # A file of peft's has diffusers' layers without the name of the pipeline's part.
            for spelled in (name, name.removeprefix("transformer.")):
                layers[spelled] = weight, layout
    return layers


def split_lora(name: str) -> tuple[str, str]:
    """Split the name of a LoRA's tensor into its layer, without wrappers, and DOWN, UP or ALPHA; "" for any other."""
    bare = clean(clean(name).removeprefix("base_model.model."))
    found = _KIND.search(bare)
    if found is None:
        return bare, ""
    kind = {"A": DOWN, "down": DOWN, "B": UP, "up": UP, None: ALPHA}[found.group(1)]
    return bare[: found.start()], kind
