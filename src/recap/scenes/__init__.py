"""Made-up clips of which everything is known: what is where, and where it goes."""

from recap.scenes.catalogue import SCENES, make_scene
from recap.scenes.render import Rendered, draw, half, render
from recap.scenes.scene import Actor, Scene, piece
from recap.scenes.weather import CLEAR, FLEETING, Weather

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
