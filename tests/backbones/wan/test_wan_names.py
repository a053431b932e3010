from __future__ import annotations

import pytest
from checkpoint_fakes import MINI, make_state

from recap.backbones.wan.checkpoint import shapes_of
from recap.backbones.wan.names import clean, to_diffusers
from recap.backbones.wan.spec import WAN_1_3B


def test_the_table_is_that_of_diffusers() -> None:
    utils = pytest.importorskip("diffusers.loaders.single_file_utils")
    for state in (make_state(), {name: name for name in shapes_of(WAN_1_3B)}):
        marked = {name: (name if isinstance(tensor, str) else tensor) for name, tensor in state.items()}
        theirs = utils.convert_wan_transformer_to_diffusers(dict(marked))
        assert {to_diffusers(name): value for name, value in marked.items()} == theirs


def test_no_two_tensors_get_one_name() -> None:
    names = list(shapes_of(MINI))
    assert len({to_diffusers(name) for name in names}) == len(names)


def test_the_names_that_are_easily_mistaken() -> None:
    assert to_diffusers("blocks.7.norm3.weight") == "blocks.7.norm2.weight"
    assert to_diffusers("head.modulation") == "scale_shift_table"
    assert to_diffusers("blocks.7.modulation") == "blocks.7.scale_shift_table"


@pytest.mark.parametrize(
    "name",
    [
        "model.blocks.3.ffn.0.weight",
        "blocks.3.ffn.0.weight",
        "model._fsdp_wrapped_module.blocks.3._fsdp_wrapped_module.ffn.0.weight",
        "module.model.blocks.3._checkpoint_wrapped_module.ffn.0.weight",
        "_orig_mod.module.blocks.3.ffn._orig_mod.0.weight",
    ],
)
def test_wrappers_are_dropped(name: str) -> None:
    assert clean(name) == "blocks.3.ffn.0.weight"


def test_only_one_leading_model_is_dropped() -> None:
    assert clean("model.model.head.head.bias") == "model.head.head.bias"
