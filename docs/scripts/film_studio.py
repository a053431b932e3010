"""Film the ready story of the studio for the docs: `python docs/scripts/film_studio.py` in a checkout.

It opens `recap studio --demo` in Chromium, looks at the page at equal steps of the video's own time, so that a slow
machine films the same, and writes docs/images/studio.gif and, of the return, docs/images/studio.jpg. It needs the
packages of the tests and Debian's chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
from playwright.sync_api import sync_playwright

from recap.io.files import write_whole
from recap.show.clips import gif_bytes

IMAGES = Path(__file__).resolve().parents[1] / "images"
STEP_S, END_S, PER_SECOND = 0.3, 8.6, 4
WIDTH, HEIGHT, GIF_WIDTH = 1120, 700, 660
SECOND = "() => document.querySelector('video')?.currentTime ?? -1"


def read(png: bytes, width: int) -> np.ndarray:
    """Return a screenshot as RGB, scaled to a width."""
    picture: Any = av.open(BytesIO(png))
    frame = next(picture.decode(video=0))
    height = 2 * round(frame.height * width / frame.width / 2)
    scaled: np.ndarray = frame.reformat(
        width=width, height=height, format="rgb24", interpolation="AREA"
    ).to_ndarray()
    return scaled


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "recap", "studio", "--demo", "--no-open", "--port", "0", "--folder"]
    shown: list[np.ndarray] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        process = subprocess.Popen([*command, folder], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            address = re.search(r"http://\S+", process.stderr.readline())
            assert address is not None, "the studio did not start"
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(address[0])
            while (at := len(shown) * STEP_S + 0.1) < END_S:
                while page.evaluate(SECOND) < at:
                    time.sleep(0.01)
                shown.append(read(page.screenshot(), GIF_WIDTH))
            still = page.screenshot(type="jpeg", quality=85)
            browser.close()
        finally:
            process.terminate()
            process.communicate(timeout=30)
    write_whole(IMAGES / "studio.gif", gif_bytes(shown, PER_SECOND))
    write_whole(IMAGES / "studio.jpg", still)
    print(f"{len(shown)} pictures: {IMAGES / 'studio.gif'}, {IMAGES / 'studio.jpg'}")


if __name__ == "__main__":
    main()
