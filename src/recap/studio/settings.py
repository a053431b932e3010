"""This module has the settings of a studio, and the bounds of what a client may ask."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from recap.errors import refuse


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds what clients may ask; every refusal names its limit."""

    prompt_characters: int = 500
    message_bytes: int = 64 * 1024
    upload_bytes: int = 256 * 2**20
    open_sessions: int = 4
    kept_sessions: int = 50
    subscribers: int = 16
    branches: int = 16
    casts: int = 100
    waiting_videos: int = 8
    kept_videos: int = 50
    video_seconds: float = 120.0
    session_seconds: float = 3600.0
    disk_bytes: int = 8 * 2**30

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise refuse(field.name, getattr(self, field.name), "must be above 0", "leave it out")


@dataclass(frozen=True, slots=True)
class StudioSettings:
    """Sets up a studio."""

    folder: Path
    backbone: str = "embedded"
    flow: str = "auto"
    device: str = "auto"
    # Of the model, as in a `RunConfig`; sessions are opened again only with the precision that they began with.
    precision: str = "full"
    low_memory: str = "auto"
    # LoRAs of a public Wan model, FILE or FILE:strength each; sessions are opened again only with the same ones.
    loras: tuple[str, ...] = ()
    # Blocks that are generated ahead of what was seen.
    lead_blocks: int = 2
    # Sessions that are generated in one forward where their memories have equal shapes; 1 generates them one by one.
    batch: int = 1
    host: str = "127.0.0.1"
    port: int = 8765
    # Requests without it are refused; "" refuses none.
    token: str = ""
    # Allows any client without a token; for a demonstration on a machine that has nothing else on it.
    public: bool = False
    # The site that may show the page in a frame of its own, as https://NAME; "" is none.
    framed_by: str = ""
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 1 <= self.lead_blocks <= 100:
            raise refuse("lead_blocks", self.lead_blocks, "must be 1 to 100", "2 is the default")
        if not self.is_local and not self.token and not self.public:
            limit = "other machines can reach it, and it has no token"
            raise refuse("--host", self.host, limit, "add --token, or leave --host out")
        if self.token and (len(self.token) < 12 or not self.token.isascii() or not self.token.isprintable()):
            raise refuse("--token", "...", "must be 12 or more plain characters", "choose a longer one")
        if self.framed_by and not re.fullmatch(r"https://[a-z0-9.-]+(:[0-9]+)?", self.framed_by):
            raise refuse("framed_by", self.framed_by, "must read https://NAME", "leave it out for no frame")

    @property
    def is_local(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")
