"""Made-up clips of which everything is known: what is where, and where it goes."""

from recap.scenes.catalogue import SCENES, make_scene
from recap.scenes.render import Rendered, draw, half, render
from recap.scenes.scene import Actor, Scene

__all__ = ["SCENES", "Actor", "Rendered", "Scene", "draw", "half", "make_scene", "render"]
