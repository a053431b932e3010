"""This module binds the port on which a server listens."""

from __future__ import annotations

import socket

from recap.errors import refuse
from recap.studio.settings import StudioSettings


def bound_socket(settings: StudioSettings) -> socket.socket:
    """Bind the port, or say who might have it."""
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
