"""The guard refuses requests with a wrong host name, from another site, or without the token if there is one."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from recap.studio.settings import StudioSettings

COOKIE = "recap_studio"
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors "
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """Checks host, origin and token of every request before the application sees it."""

    def __init__(self, app: Any, settings: StudioSettings) -> None:
        self._app = app
        self._settings = settings
        names = {settings.host, *(("localhost", "127.0.0.1", "::1") if settings.is_local else ())}
        # On all interfaces the server has any name; then only the token, if there is one, keeps clients out.
        self._names = None if settings.host in ("0.0.0.0", "::") else names
        self._headers = {**HEADERS, "content-security-policy": POLICY + (settings.framed_by or "'none'")}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        problem = self._problem(headers, scope)
        if problem is not None:
            await _reject(scope, receive, send, *problem)
            return
        await self._app(scope, receive, _with_headers(send, self._headers, self._cookie(scope)))

    def _problem(self, headers: dict[str, str], scope: dict[str, Any]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._names is not None and _name_of(host) not in self._names:
            # A page of another site whose name resolves to this machine sends its own name.
            return 403, f"host is {host!r}: this studio answers to {', '.join(sorted(self._names))}"
        origin = headers.get("origin")
        # Not parsed as an address, which fails for some texts.
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"origin is {origin!r}: only the studio's own page may ask"
        if self._settings.token and not self._knows_token(headers, scope):
            return 401, "token is missing or wrong: open the address with ?token=... that the server printed"
        return None

    def _knows_token(self, headers: dict[str, str], scope: dict[str, Any]) -> bool:
        tokens = [headers.get("authorization", "").removeprefix("Bearer "), *_asked_token(scope)]
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            tokens += [cookie.value] if cookie else []
        except CookieError:
            pass
        return any(hmac.compare_digest(word.encode(), self._settings.token.encode()) for word in tokens)

    def _cookie(self, scope: dict[str, Any]) -> str | None:
        """Return the cookie for a page that was opened with the token: what it loads then needs none."""
        if not self._settings.token or not _asked_token(scope):
            return None
        return f"{COOKIE}={self._settings.token}; HttpOnly; SameSite=Strict; Path=/"


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _asked_token(scope: dict[str, Any]) -> list[str]:
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])[:1]


def _with_headers(send: Send, headers: dict[str, str], cookie: str | None) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in headers.items()]
    if cookie is not None:
        extra.append((b"set-cookie", cookie.encode()))

    async def send_with_headers(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return send_with_headers


async def _reject(scope: dict[str, Any], receive: Receive, send: Send, code: int, text: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": text[:100]})
        return
    body = json.dumps({"v": 1, "type": "error", "id": "", "text": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def add_guard(app: Any, settings: StudioSettings) -> None:
    """Put the guard in front of an application."""
    app.add_middleware(Guard, settings=settings)
