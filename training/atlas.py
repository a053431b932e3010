"""Make the sprites of the world's actors from the Noto Color Emoji font: `python -m training.atlas`.

The font is Google's, under the SIL Open Font License 1.1, and comes with Debian's `fonts-noto-color-emoji`. Only
this module needs it, to make `training/cache/atlas.npz`; neither the font nor the atlas is part of the package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recap.backbones.tiny.vocabulary import ACTORS
from recap.errors import refuse

GLYPHS: dict[str, str] = {
    "fox": "🦊", "cat": "🐈", "dog": "🐕", "rabbit": "🐇", "penguin": "🐧", "duck": "🦆", "turtle": "🐢",
    "elephant": "🐘", "sheep": "🐑", "dinosaur": "🦕", "snail": "🐌", "frog": "🐸", "robot": "🤖", "bear": "🧸",
    "car": "🚗", "bus": "🚌", "tractor": "🚜", "boat": "⛵", "fish": "🐠", "whale": "🐋", "bird": "🐦",
    "owl": "🦉", "balloon": "🎈", "ghost": "👻",
}  # fmt: skip
SIDE = 96
"""A sprite has this many pixels; the largest actor is drawn smaller."""

MARGIN = 3
"""This many empty pixels surround a sprite, so that a rotated or blurred one is not cut."""

STRIKE = 109
"""The only size for which the font has bitmaps."""

FONT = "NotoColorEmoji.ttf"
"""The font is found by name among the system's fonts."""

CACHE = Path(__file__).resolve().parent / "cache" / "atlas.npz"


def draw_glyph(font_file: str, character: str) -> np.ndarray:
    """Draw one sprite, SIDE SIDE 4 in 0..1, premultiplied; it stands on the bottom margin, centred."""
    from PIL import Image, ImageDraw, ImageFont

    try:
        font = ImageFont.truetype(font_file, STRIKE)
    except OSError:
        remedy = "apt-get install fonts-noto-color-emoji, or pass --font FILE"
        raise refuse("font", font_file, "no such font on this system", remedy) from None
    canvas = Image.new("RGBA", (2 * STRIKE, 2 * STRIKE), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((STRIKE // 4, STRIKE // 4), character, font=font, embedded_color=True)
    box = canvas.getbbox()
    if box is None:
        raise refuse("font", font_file, f"it draws nothing for {character}", "use NotoColorEmoji.ttf")
    glyph = canvas.crop(box)
    inner = SIDE - 2 * MARGIN
    scale = inner / max(glyph.size)
    size = (max(1, round(glyph.width * scale)), max(1, round(glyph.height * scale)))
    pixels = np.asarray(glyph, dtype=np.float32) / 255
    # Premultiplied before resizing; otherwise the colour of transparent pixels would show.
    pixels[..., :3] *= pixels[..., 3:]
    planes = [
        Image.fromarray(plane).resize(size, Image.Resampling.LANCZOS) for plane in np.moveaxis(pixels, -1, 0)
    ]
    sprite = np.zeros((SIDE, SIDE, 4), np.float32)
    left, top = (SIDE - size[0]) // 2, SIDE - MARGIN - size[1]
    sprite[top : top + size[1], left : left + size[0]] = np.stack(
        [np.asarray(plane) for plane in planes], axis=-1
    )
    alpha = sprite[..., 3:].clip(0, 1)
    return np.concatenate((sprite[..., :3].clip(0, alpha), alpha), axis=-1)


def make_atlas(font_file: str, out: Path) -> None:
    """Draw every actor and write the atlas: `rgba` N SIDE SIDE 4 uint8 premultiplied, `names` N."""
    sprites = np.stack([draw_glyph(font_file, GLYPHS[actor]) for actor in ACTORS])
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, rgba=(sprites * 255).round().astype(np.uint8), names=np.array(ACTORS))


def load_atlas(file: Path = CACHE, device: torch.device | str = "cpu") -> Tensor:
    """Load the sprites, N 4 SIDE SIDE in 0..1, premultiplied, in the order of ACTORS; all face left."""
    if not file.is_file():
        raise refuse("atlas", str(file), "no such file", "make it with python -m training.atlas")
    with np.load(file) as stored:
        names, rgba = tuple(str(name) for name in stored["names"]), stored["rgba"]
    if names != ACTORS:
        raise refuse("atlas", str(file), "its actors are not those of the vocabulary", "make it again")
    return torch.from_numpy(rgba).to(device).permute(0, 3, 1, 2).float() / 255


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--font", default=FONT)
    parser.add_argument("--out", type=Path, default=CACHE)
    arguments = parser.parse_args()
    make_atlas(arguments.font, arguments.out)
    print(f"{len(ACTORS)} actors, {arguments.out.stat().st_size / 1024:.0f} KiB: {arguments.out}")


if __name__ == "__main__":
    main()
