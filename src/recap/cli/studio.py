"""`recap studio` serves the studio on this machine: a page on which a video is directed while it plays."""

from __future__ import annotations

import logging
import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import show_notice
from recap.cli.options import LowMemory, Precision, used
from recap.io.extras import import_extra
from recap.studio.listening import bound_socket
from recap.studio.server import make_app
from recap.studio.settings import StudioSettings
from recap.studio.studio import Studio

NEEDED = ("fastapi", "uvicorn", "websockets")


def studio_command(
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's own needs --token.")
    ] = "127.0.0.1",
    token: Annotated[str, typer.Option(help="Who does not know it is refused; 12 or more characters.")] = "",
    folder: Annotated[Path, typer.Option(help="Where sessions, casts and videos are kept.")] = Path("studio"),
    backbone: Annotated[
        str, typer.Option(help="Which model generates; see `recap list backbones`.")
    ] = "embedded",
    batch: Annotated[int, typer.Option(help="Sessions generated in one forward.")] = 1,
    precision: Precision = None,
    low_memory: LowMemory = None,
    demo: Annotated[bool, typer.Option("--demo", help="Begin with a ready story.")] = False,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Direct a video while it plays, on a page in your browser.

    It listens on this machine alone unless --host says otherwise. Sessions are kept in the folder and can be opened
    again, whatever ended the server.
    """
    for package in NEEDED:
        import_extra(package, "recap studio", "studio")
    wait_asleep()
    settings = StudioSettings(
        folder, backbone=backbone, batch=batch, host=host, port=port, token=token,
        **used(precision=precision, low_memory=low_memory),
    )  # fmt: skip
    with bound_socket(settings) as listening:
        port = listening.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{port}/" + (f"?token={token}" if token else "") + ("#demo" if demo else "")
        studio = Studio(settings, notice=show_notice)
        show_notice(f"studio: {address} (end it with Ctrl-C)")
        if browser:
            threading.Timer(1.0, webbrowser.open, (address,)).start()
        serve(studio, listening)


def wait_asleep() -> None:
    """Start this process again so that the model's threads sleep while they wait for each other.

    By default they spin, which takes the cores from the browser that shows the video, and from each other: with
    something else running on 2 cores, a block takes several times as long. OpenMP reads this only when it is loaded.
    """
    asked = sys.argv[1:]
    own = os.name == "posix" and sys.orig_argv[len(sys.orig_argv) - len(asked) :] == asked
    if own and "OMP_WAIT_POLICY" not in os.environ:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def serve(studio: Studio, listening: Any) -> None:
    """Serve a studio until the process is told to end."""
    uvicorn = import_extra("uvicorn", "recap studio", "studio")
    logging.getLogger("recap.studio").addHandler(logging.StreamHandler())
    most = studio.settings.limits.message_bytes
    config = uvicorn.Config(
        make_app(studio),
        log_level="warning",
        # One more than the limit, so that the studio's own words refuse what is too long.
        ws_max_size=4 * most,
        ws_max_queue=32,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[listening])
