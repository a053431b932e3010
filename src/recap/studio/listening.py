"""This module binds the port on which a server listens, and runs the server there."""

from __future__ import annotations

import logging
import socket
from typing import Any

from recap.errors import refuse
from recap.io.extras import import_extra
from recap.studio.settings import StudioSettings

NEEDED = ("fastapi", "uvicorn", "websockets")
"""The packages of the extra `studio`."""


def check_packages(command: str) -> None:
    """Refuse a command that serves where a package for it is missing."""
    for package in NEEDED:
        import_extra(package, command, "studio")


def bound_socket(settings: StudioSettings) -> socket.socket:
    """Bind the port of a server, and listen there."""
    if not 0 <= settings.port < 2**16:
        raise refuse("--port", settings.port, "must be 0 to 65535", "leave it out")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
        # From here on a browser that is faster than the server waits instead of being refused.
        made.listen()
    except OSError as error:
        made.close()
        limit = f"{settings.host} cannot be listened on there ({error.strerror or error})"
        raise refuse("--port", settings.port, limit, "choose another port, or --port 0") from error
    return made


def address_of(settings: StudioSettings, listening: socket.socket) -> str:
    """Return the address at which a bound server answers, without a path."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


def page_address(settings: StudioSettings, listening: socket.socket) -> str:
    """Return the address to open in a browser, with the token if there is one."""
    return f"{address_of(settings, listening)}/" + (f"?token={settings.token}" if settings.token else "")


def make_server(app: Any, settings: StudioSettings, shutdown_s: int = 3) -> Any:
    """Make the server of an application; `shutdown_s` is how long open requests may take when it ends."""
    uvicorn: Any = import_extra("uvicorn", "serving pages", "studio")
    config = uvicorn.Config(
        app,
        log_level="warning",
        # Above the studio's own limit, which then refuses what is too long, with a message.
        ws_max_size=4 * settings.limits.message_bytes,
        ws_max_queue=32,
        timeout_graceful_shutdown=shutdown_s,
    )
    return uvicorn.Server(config)


def serve_app(app: Any, settings: StudioSettings, listening: socket.socket) -> None:
    """Serve an application until the process is asked to end."""
    logging.getLogger("recap.studio").addHandler(logging.StreamHandler())
    make_server(app, settings).run(sockets=[listening])
