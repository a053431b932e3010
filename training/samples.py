"""Make the contact sheet of docs/concepts.md: twelve samples of the shipped weights, first seeds, not selected.

    python -m training.samples --flow world-flow --out docs/images/samples.jpg
    python -m training.samples --flow world-flow --outside --out docs/log/edition2-outside.jpg

Sample i has seed i, with `--outside` 101 + i: prompts and seeds that a reader of the first edition chose. Every other
setting is the default.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cv2
import numpy as np

from recap.config import RunConfig
from recap.flow import FLOWS
from recap.io.files import write_whole
from recap.run import generate
from recap.show.sheet import moments_sheet

PROMPTS = (
    "a fox on a beach by day",
    "a bus in a city at night",
    "a penguin and a whale in the snow by day",
    "a ghost in a forest at night",
    "a car in a desert in the evening",
    "an elephant and a balloon in a meadow by day",
    "a turtle and a fish under the sea by day",
    "a robot in the mountains in the evening",
    "an owl in a forest by day",
    "a sheep and a tractor in a meadow in the evening",
    "a dinosaur in the mountains by day",
    "a boat on the sea at night",
)
OUTSIDE = (
    "an owl in a forest at night",
    "a robot in a city at night",
    "a penguin in the snow by day",
    "a sheep in a meadow by day",
    "a bear in the mountains by day",
    "a duck and a tractor in a meadow by day",
    "an elephant in a desert by day",
    "a ghost and a frog in a forest at night",
    "a balloon and a dog in a meadow by day",
    "a turtle on a beach by day",
    "a whale under the sea by day",
    "a car and a dinosaur in a desert in the evening",
)
SECONDS = (0.5, 2.5, 5.0, 7.5, 9.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flow", choices=list(FLOWS), default="auto")
    parser.add_argument(
        "--outside", action="store_true", help="prompts and seeds of a reader of the first edition"
    )
    options = parser.parse_args()
    prompts, first = (OUTSIDE, 101) if options.outside else (PROMPTS, 0)
    clips: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, prompt in enumerate(prompts, first):
            shots = [{"prompt": prompt, "seconds": 10.0}]
            config = RunConfig.from_dict({"shots": shots, "seeds": [seed], "flow": options.flow})
            (clips[prompt],) = generate(config, Path(folder) / str(seed)).videos
            print(f"{len(clips)} of {len(prompts)}: {prompt}", flush=True)
        sheet = moments_sheet(clips, {second: f"{second:g}s" for second in SECONDS})
    _, encoded = cv2.imencode(".jpg", np.ascontiguousarray(sheet[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 90])
    write_whole(options.out, encoded.tobytes())


if __name__ == "__main__":
    main()
