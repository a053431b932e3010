"""Clips inside pages: embedded as they are, at half size, or linked."""

from __future__ import annotations

import base64
from pathlib import Path

import torch
from torch.nn import functional

from recap.io.video import ClipWriter, open_clip

# A page of 25 MB still opens at once; base64 makes four bytes of three.
EMBED_LIMIT = 18_000_000


def embed(video: Path, limit: int = EMBED_LIMIT, link: str = "") -> tuple[str, str]:
    """Return the source for a page's player, and a remark for its reader (empty if the clip is embedded as it is).

    Beyond the limit a clip is embedded at half size; if that is too large as well, the page links the file.
    `link` is the path from the page to the clip, where they are not in one folder.
    """
    link = link or video.name
    if video.stat().st_size <= limit:
        return _data_uri(video), ""
    small = video.with_name("preview.mp4")
    try:
        _halve(video, small)
        if small.stat().st_size <= limit:
            return _data_uri(small), f"Shown at half size; the full one is {link} next to this page."
    finally:
        small.unlink(missing_ok=True)
    return link, f"The video is too large for the page and is read from {link} next to it."


def _halve(video: Path, small: Path) -> None:
    clip = open_clip(video)
    size = (clip.height // 4 * 2, clip.width // 4 * 2)
    with ClipWriter(small, size, clip.fps, quality=29) as writer:
        for picture in clip.pictures():
            pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
            writer.write(functional.interpolate(pixels, size=size, mode="area"))


def _data_uri(video: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()
