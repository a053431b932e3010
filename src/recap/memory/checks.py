"""Checks that the settings of several memories share."""

from __future__ import annotations

import dataclasses

from recap.errors import refuse
from recap.memory.window import check_window
from recap.types import BackboneSpec


def own_window(spec: BackboneSpec, window_frames: int) -> BackboneSpec:
    """The backbone's sizes with a window of the memory's own, whatever the backbone's is."""
    check_window(spec)
    block = spec.frames_per_block
    if window_frames < block:
        limit = f"a block of {block} frames must fit into it"
        raise refuse("window_frames", window_frames, limit, f"use {block} or more")
    return dataclasses.replace(spec, window_frames=window_frames)


def check_frames(field: str, value: int, low: int, high: int, why: str) -> None:
    """Refuse a number of frames outside low..high."""
    if not low <= value <= high:
        raise refuse(field, value, f"must be {low} to {high}, {why}", f"use {min(max(value, low), high)}")
