"""This module follows orders: all processes of a run but the first build the same parts and do as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recap.config import RunConfig
from recap.fast.ranks.group import Ranks
from recap.fast.ranks.states import join_state, load_state
from recap.io.report import SILENT
from recap.rollout import Resume
from recap.run import RunParts
from recap.types import GeneratedBlock


def follow(ranks: Ranks) -> None:
    """Do what the leader orders, until it is done or gone; no file is written."""
    parts: RunParts | None = None
    blocks: Iterator[GeneratedBlock] = iter(())
    while (order := ranks.tell())["do"] != "end":
        if order["do"] == "build":
            config = RunConfig.from_dict(order["config"])
            parts = RunParts(config, Path(order["folder"]), SILENT, fresh=order["fresh"], ranks=ranks)
        assert parts is not None, "the first order is to build"
        if order["do"] == "load":
            load_state(parts.policy, ranks, None, parts.config.device)
        elif order["do"] == "begin":
            blocks = parts.start(_read_resume(ranks, order, parts.config.device))
        elif order["do"] == "block":
            next(blocks, None)
        elif order["do"] == "state":
            join_state(parts.policy, ranks)


def _read_resume(ranks: Ranks, order: dict[str, Any], device: str) -> Resume:
    """Return what the leader's rollout continues from."""
    shared = ranks.share(None, device)
    return Resume(
        block=order["block"],
        recent_latents=[shared[f"{index}"] for index in range(order["recent"])],
        first_latent=shared.get("first"),
        latents_of=(lambda _: ranks.share(None, device)["latents"]) if order["known"] else None,
    )
