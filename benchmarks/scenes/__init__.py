"""Synthetic clips with known content: which object each pixel shows and how it moves."""

from benchmarks.scenes.catalogue import SCENES, make_scene
from benchmarks.scenes.render import Rendered, draw, half, render
from benchmarks.scenes.scene import Actor, Scene, piece
from benchmarks.scenes.weather import CLEAR, FLEETING, Weather

__all__ = [
    "CLEAR",
    "FLEETING",
    "SCENES",
    "Actor",
    "Rendered",
    "Scene",
    "Weather",
    "draw",
    "half",
    "make_scene",
    "piece",
    "render",
]
