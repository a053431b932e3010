"""From options to a config, for the commands that generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recap.backbones.wan.family import released_memory
from recap.config import RunConfig, override, read_json
from recap.errors import refuse

DEFAULT_SECONDS = 10.0


def full_config(values: dict[str, Any], settings: Sequence[str]) -> RunConfig:
    """Make the config of these values, None where an option was not used, and of the assignments of --set."""
    chosen = {name: value for name, value in values.items() if value is not None}
    return RunConfig.from_dict(override(chosen, settings))


def script_shots(prompt: str | None, seconds: float | None, script: Path | None) -> Any:
    """Read the shots of a prompt or of a script's file, as `RunConfig.from_dict` takes them."""
    if prompt is None and script is None:
        remedy = 'for example "a fox on a beach by day", or use --script'
        raise refuse("prompt", None, "it says what to generate", remedy)
    if script is None:
        return [{"prompt": prompt, "seconds": DEFAULT_SECONDS if seconds is None else seconds}]
    if prompt is not None:
        raise refuse("prompt", prompt, "--script has prompts of its own", "use one of the two")
    if seconds is not None:
        raise refuse("--seconds", seconds, "a script has its own", "leave it out")
    return read_json(script)


def opening_path(clip: Path | None, image: Path | None) -> str | None:
    """Choose the clip or picture that the video continues."""
    if clip is not None and image is not None:
        raise refuse("--image", str(image), "--continue names pictures too", "use one of the two")
    chosen = clip or image
    return None if chosen is None else str(chosen)


def backbone_choice(
    name: str | None, decoder: str | None, prompt_embeds: Path | None, *, as_released: bool
) -> Any:
    """Name the backbone with the settings that have options of their own; None where no option was used."""
    settings: dict[str, Any] = {} if decoder is None else {"decoder": decoder}
    if prompt_embeds is not None:
        settings["prompt_embeds"] = str(prompt_embeds)
    if as_released:
        settings["as_released"] = True
    if not settings:
        return name
    if name is None:
        option, value = next(iter(settings.items()))
        limit = "it is a setting of the public models"
        raise refuse(f"--{option.replace('_', '-')}", value, limit, "name one with --backbone")
    return {"name": name, **settings}


def memory_choice(name: str | None, backbone: str | None, *, as_released: bool) -> Any:
    """Name the memory: the one of the public code where --as-released is used and none is named."""
    if name is None and as_released and backbone is not None:
        return released_memory(backbone)
    return name
