"""A stand-in for the sprite world: plain squares that slide over a plain background, at any size."""

from __future__ import annotations

import torch

from training.clips import Clips


class SquaresWorld:
    """Two squares on a background, in random colours; captions are random words."""

    def __init__(self, size: tuple[int, int] = (32, 48), num_pictures: int = 9, words: int = 6) -> None:
        self.size = size
        self.num_pictures = num_pictures
        self.words = words

    def __call__(self, num_clips: int, seed: int) -> Clips:
        generator = torch.Generator().manual_seed(seed)
        height, width = self.size
        draw = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
        pixels = draw(num_clips, 1, 3, 1, 1).expand(-1, self.num_pictures, -1, height, width).clone()
        time = torch.arange(self.num_pictures).view(1, -1, 1, 1)
        rows, columns = torch.arange(height).view(1, 1, -1, 1), torch.arange(width).view(1, 1, 1, -1)
        for _ in range(2):
            side = (0.3 + 0.3 * draw(num_clips, 1, 1, 1)) * height
            top = draw(num_clips, 1, 1, 1) * (height - side)
            left = draw(num_clips, 1, 1, 1) * width + (draw(num_clips, 1, 1, 1) - 0.5) * 6 * time
            inside = ((rows - top).abs() < side / 2) & ((columns - left).abs() < side / 2)
            pixels = torch.where(inside.unsqueeze(2), draw(num_clips, 1, 3, 1, 1), pixels)
        blocks = (self.num_pictures + 3) // 12 or 1
        words = torch.randint(1, 20, (num_clips, blocks, self.words), generator=generator)
        frames = (self.num_pictures + 3) // 4
        tokens = (num_clips, frames, height // 16, width // 16)
        return Clips(pixels, words, draw(*tokens), draw(*tokens))
