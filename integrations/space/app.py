"""This program serves the studio as a Space of Hugging Face: anybody directs a video there, on the CPU.

    python app.py --port 7860

The small model is in the package, so nothing is fetched when it starts.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from recap import RecapError
from recap.cli.studio import wait_asleep
from recap.studio.listening import bound_socket, serve_app
from recap.studio.server import make_app
from recap.studio.settings import Limits, StudioSettings
from recap.studio.studio import Studio

LIMITS = Limits(
    open_sessions=4,
    kept_sessions=12,
    upload_bytes=32 * 2**20,
    waiting_videos=2,
    kept_videos=8,
    video_seconds=20.0,
    session_seconds=180.0,
    disk_bytes=2 * 2**30,
)
"""What two cores can serve: few at a time, for minutes each."""

ABANDONED_S = 120.0


def forget_abandoned(studio: Studio, seconds: float = ABANDONED_S) -> None:
    """Delete, for ever, the sessions that nobody watched at two looks in a row: there is room for few."""
    before: set[str] = set()
    while True:
        time.sleep(seconds)
        watched = {name for name, live in list(studio.sessions.items()) if len(live.hub)}
        now = set(studio.folder.ids()) - watched
        for name in now & before:
            # Somebody else may have deleted it.
            with suppress(RecapError, OSError):
                studio.delete(name)
        before = now


def main() -> None:
    """Serve until the process is asked to end."""
    parser = argparse.ArgumentParser(description="Serve the studio to anybody.")
    parser.add_argument(
        "--port", type=int, default=7860, help="7860 is what a Space listens to; 0 takes a free one"
    )
    parser.add_argument("--abandoned", type=float, default=ABANDONED_S, help="seconds between two looks")
    asked = parser.parse_args()
    wait_asleep()
    with tempfile.TemporaryDirectory(prefix="recap-space-") as folder:
        settings = StudioSettings(
            Path(folder),
            device="cpu",
            host="0.0.0.0",
            port=asked.port,
            public=True,
            framed_by="https://huggingface.co",
            limits=LIMITS,
        )
        with bound_socket(settings) as listening:
            studio = Studio(settings)
            print(f"studio: port {listening.getsockname()[1]}", flush=True)
            looking = threading.Thread(target=forget_abandoned, args=(studio, asked.abandoned), daemon=True)
            looking.start()
            serve_app(make_app(studio), settings, listening)


if __name__ == "__main__":
    main()
