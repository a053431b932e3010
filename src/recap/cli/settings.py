"""From flags to a config: what the commands that draw share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recap.backbones.wan.family import released_memory
from recap.config import RunConfig, override, read_json
from recap.errors import refuse


def full_config(values: dict[str, Any], settings: Sequence[str]) -> RunConfig:
    """The config of these values, the assignments of --set applied to all its settings."""
    plain = override({}, [text for text in settings if "." not in text.partition("=")[0]])
    complete = RunConfig.from_dict({**values, **plain}).to_dict()
    return RunConfig.from_dict(override(complete, settings))


def script_shots(prompt: str | None, seconds: float | None, script: Path | None) -> Any:
    """The shots of a prompt or of a script's file, as `RunConfig.from_dict` takes them."""
    if (prompt is None) == (script is None):
        raise refuse("prompt", prompt, "give a prompt or a --script, one of the two", "see --help")
    if script is not None:
        if seconds is not None:
            raise refuse("--seconds", seconds, "a script has its own", "leave it out")
        return read_json(script)
    return [{"prompt": prompt, "seconds": 10.0 if seconds is None else seconds}]


def opening_of(clip: Path | None, image: Path | None) -> str | None:
    """The pictures to go on from, as the config names them."""
    if clip is not None and image is not None:
        raise refuse("--image", str(image), "--continue names pictures too", "give one of the two")
    chosen = clip or image
    return None if chosen is None else str(chosen)


def backbone_choice(
    name: str | None,
    memory: str | None,
    decoder: str | None,
    prompt_embeds: Path | None,
    *,
    as_released: bool,
) -> dict[str, Any]:
    """Backbone and memory as the config takes them; None where nothing was said."""
    said = {"decoder": decoder, "prompt_embeds": None if prompt_embeds is None else str(prompt_embeds)}
    settings: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
    if not (settings or as_released):
        return {"backbone": name, "memory": memory}
    if name is None:
        first = "--as-released" if as_released else f"--{next(iter(settings)).replace('_', '-')}"
        limit = "it is a setting of the public models"
        raise refuse(first, next(iter(settings.values()), True), limit, "name one with --backbone")
    if as_released:
        return {
            "backbone": {"name": name, "as_released": True, **settings},
            "memory": memory or released_memory(name),
        }
    return {"backbone": {"name": name, **settings}, "memory": memory}
