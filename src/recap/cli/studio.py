"""`recap studio` serves the studio on this machine: a page on which a video is directed while it plays."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from recap.backbones.wan.lora import read_choice
from recap.backbones.wan.lora_alpha import REMEDY
from recap.cli.console import show_notice
from recap.cli.options import Host, Loras, LowMemory, OpenPage, Port, Precision, Token, used
from recap.cli.settings import read_loras
from recap.io.weights import files_of
from recap.studio.listening import bound_socket, check_packages, page_address, serve_app
from recap.studio.server import make_app
from recap.studio.settings import StudioSettings
from recap.studio.studio import Studio


def studio_command(
    port: Port = 8765,
    host: Host = "127.0.0.1",
    token: Token = "",
    folder: Annotated[Path, typer.Option(help="Where sessions, casts and videos are kept.")] = Path("studio"),
    backbone: Annotated[
        str, typer.Option(help="Which model generates; see `recap list backbones`.")
    ] = "embedded",
    batch: Annotated[int, typer.Option(help="Sessions generated in one forward.")] = 1,
    lora: Loras = None,
    precision: Precision = None,
    low_memory: LowMemory = None,
    demo: Annotated[bool, typer.Option("--demo", help="Begin with a ready story.")] = False,
    browser: OpenPage = True,
) -> None:
    """Direct a video while it plays, on a page in your browser.

    It listens on this machine alone unless --host says otherwise. Sessions are kept in the folder and can be opened
    again, whatever ended the server.
    """
    check_packages("recap studio")
    wait_asleep()
    loras = read_loras(backbone, lora)
    for text in loras:
        # The model is loaded with the first session, which is late to hear of a misspelt name.
        files_of(read_choice(text).path, "--lora", REMEDY)
    settings = StudioSettings(
        folder, backbone=backbone, batch=batch, host=host, port=port, token=token, loras=loras,
        **used(precision=precision, low_memory=low_memory),
    )  # fmt: skip
    with bound_socket(settings) as listening:
        address = page_address(settings, listening) + ("#demo" if demo else "")
        studio = Studio(settings, notice=show_notice)
        show_notice(f"studio: {address} (end it with Ctrl-C)")
        if browser:
            threading.Timer(1.0, webbrowser.open, (address,)).start()
        serve_app(make_app(studio), settings, listening)


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
