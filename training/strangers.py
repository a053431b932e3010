"""Make a sheet of twelve prompts as strangers would write them, each with the first seed, unpicked.

    python -m training.strangers --out docs/log/edition2-prompts.jpg

The words are read as `recap generate` reads them; every notice on what was replaced or left out is printed. None of
these texts is in the training data, which has captions in the words of the vocabulary alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch

from recap.backbones.tiny.backbone import WEIGHTS, build_embedded
from recap.backbones.tiny.reading import PromptReader
from recap.io.files import write_whole
from recap.show.sheet import pictures_sheet
from training.sampling import sample

PROMPTS = (
    "a lion in the jungle",
    "a red bus on a rainy street at night",
    "my dog playing in the snow",
    "a sailboat on the ocean at sunset",
    "a penguin and a polar bear on the ice",
    "an old robot alone in the desert",
    "a ghost between dark trees at midnight",
    "an empty beach at sunrise",
    "the city at night with nobody in it",
    "a duck next to a tractor on a farm",
    "a hot air balloon over the mountains in the evening",
    "a shark chasing a fish deep under water",
)
NUM_COLUMNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder [default: the package's]")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="file of the sheet, JPEG")
    options = parser.parse_args()
    backbone = build_embedded(folder=options.weights, read=PromptReader(print))
    rows: dict[str, list[np.ndarray]] = {}
    seconds: list[float] = []
    for prompt in PROMPTS:
        # Alone, so that each has seed 0.
        _, pixels = sample(backbone, options.blocks, [prompt])
        shown = torch.linspace(0, pixels.shape[1] - 1, NUM_COLUMNS).round().long()
        seconds = [index / backbone.spec.pictures_per_second for index in shown.tolist()]
        pictures = (pixels[0, shown].clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
        rows[prompt] = list(pictures.numpy())
        print(f"{prompt}: done", flush=True)
    sheet = pictures_sheet(rows, [f"{second:.1f} s" for second in seconds])
    encoded = cv2.imencode(".jpg", np.ascontiguousarray(sheet[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 88])[1]
    write_whole(options.out, encoded.tobytes())


if __name__ == "__main__":
    main()
