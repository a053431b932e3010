"""Stands in for the part of ComfyUI that the node pack meets, with the signatures of ComfyUI 0.3.75.

A test compares these signatures with a real checkout, where there is one (see conftest.py).
"""

from __future__ import annotations

import copy
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACK = Path(__file__).resolve().parents[3] / "integrations" / "comfyui"
CHECKOUT = os.environ.get("RECAP_COMFYUI", "")
"""A checkout of ComfyUI; where it is named, the tests use it instead of this file."""


class Hidden(str, Enum):
    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


class Socket:
    """Is an input or an output; its kind is known from the class it is in."""

    io_type = ""


class Input(Socket):
    def __init__(self, id, display_name=None, optional=False, tooltip=None, lazy=None, extra_dict=None):
        self.id, self.optional, self.told = id, optional, {"tooltip": tooltip}


class Output(Socket):
    def __init__(self, id=None, display_name=None, tooltip=None, is_output_list=False):
        self.id, self.display_name = id, display_name


def widget(parameters, *, defaults=None):
    """Make the input class of a widget that takes these keywords besides those of every input."""
    known = dict.fromkeys(parameters) | (defaults or {})

    class Widget(Input):
        def __init__(self, id, **given):
            if unknown := given.keys() - known.keys():
                raise TypeError(f"unexpected {sorted(unknown)}")
            super().__init__(id, optional=given.get("optional", False))
            self.told = known | given

    Widget.parameters = ("id", *parameters)
    return Widget


COMMON = ("display_name", "optional", "tooltip", "lazy", "default", "socketless")
NUMBER = (*COMMON, "force_input", "min", "max", "step", "display_mode")
WIDGETS = {
    "Int": widget((*NUMBER, "control_after_generate")),
    "Float": widget((*NUMBER, "round")),
    "String": widget((*COMMON, "force_input", "multiline", "placeholder", "dynamic_prompts")),
    "Combo": widget((*COMMON, "options", "control_after_generate", "upload", "image_folder", "remote")),
    "Image": Input,
}


def Custom(io_type):
    return comfy_type(io_type, Input)


def comfy_type(io_type, given):
    kinds = {"io_type": io_type}
    return SimpleNamespace(
        Input=type("Input", (given,), kinds), Output=type("Output", (Output,), kinds), io_type=io_type
    )


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list | None = None
    outputs: list | None = None
    hidden: list | None = None
    description: str = ""
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_api_node: bool = False
    not_idempotent: bool = False
    enable_expand: bool = False


class NodeOutput:
    def __init__(self, *args, ui=None, expand=None, block_execution=None):
        self.result, self.ui = args, ui


class ComfyNode(ABC):
    hidden = None

    @classmethod
    @abstractmethod
    def define_schema(cls): ...

    @classmethod
    @abstractmethod
    def execute(cls, **kwargs): ...

    @classmethod
    def GET_SCHEMA(cls):
        schema = cls.define_schema()
        ids = [socket.id for socket in (*schema.inputs, *schema.outputs)]
        if len(set(ids)) < len(ids):
            raise ValueError(f"ids of inputs and outputs must be unique: {ids}")
        return schema

    @classmethod
    def INPUT_TYPES(cls):
        found = {"required": {}, "optional": {}}
        for each in cls.GET_SCHEMA().inputs:
            found["optional" if each.optional else "required"][each.id] = (each.io_type, each.told)
        return found

    @classmethod
    def PREPARE_CLASS_CLONE(cls, hidden_inputs):
        """Return a class of its own per run, as the real one does: nothing may be kept on the class."""
        clone = type(cls.__name__, (cls,), {})
        clone.hidden = SimpleNamespace(unique_id=hidden_inputs.get(Hidden.unique_id))
        return clone

    @classmethod
    def EXECUTE_NORMALIZED(cls, **kwargs):
        made = cls.execute(**kwargs)
        assert isinstance(made, NodeOutput)
        return made


class ComfyExtension(ABC):
    async def on_load(self): ...

    @abstractmethod
    async def get_node_list(self): ...


class PreviewImage:
    def __init__(self, image, animated=False, cls=None, **kwargs):
        self.image = image


class InterruptProcessingException(Exception): ...


class StandIn:
    """Is one ComfyUI: what it was told of the progress, and whether somebody pressed Cancel."""

    def __init__(self):
        self.progress, self.cancel_at = [], None

    def set_progress(self, value, max_value, node_id=None, preview_image=None, ignore_size_limit=False):
        self.progress.append((value, max_value, node_id, copy.copy(preview_image)))

    def throw_exception_if_processing_interrupted(self):
        if self.cancel_at is not None and len(self.progress) >= self.cancel_at:
            raise InterruptProcessingException

    def install(self, monkeypatch):
        """Put the modules where the pack imports them."""
        types = {name: comfy_type(name.upper(), kind) for name, kind in WIDGETS.items()}
        io = SimpleNamespace(
            **types, Custom=Custom, Hidden=Hidden, Schema=Schema, NodeOutput=NodeOutput, ComfyNode=ComfyNode
        )
        api = SimpleNamespace(execution=SimpleNamespace(set_progress=self.set_progress))
        parts = {
            "comfy": {},
            "comfy.model_management": {
                "throw_exception_if_processing_interrupted": self.throw_exception_if_processing_interrupted
            },
            "comfy_api": {},
            "comfy_api.latest": {
                "ComfyAPISync": lambda: api,
                "ComfyExtension": ComfyExtension,
                "io": io,
                "ui": SimpleNamespace(PreviewImage=PreviewImage),
            },
        }
        for name, members in parts.items():
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
