"""The front of a cluster has the studio's page and interface, and forwards requests to the replica with the session.

Annotations here are evaluated when a cluster is served, so that the package can be imported without FastAPI.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recap.io.extras import import_extra
from recap.studio import messages
from recap.studio.cluster.directory import Answer, Directory, Lost
from recap.studio.cluster.metrics import Metric, as_text
from recap.studio.cluster.seats import Busy, Seats, ServeSeating, busy
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.cluster.shared import SharedShelf
from recap.studio.cluster.snapshots import open_store
from recap.studio.cluster.streaming import Relay, note_pause
from recap.studio.cluster.videos import VideoDesk
from recap.studio.guard import add_guard
from recap.studio.hub import error_event
from recap.studio.pages import add_page
from recap.studio.server import add_errors, read_body, saved_as
from recap.studio.settings import StudioSettings
from recap.studio.studio import check_video

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

PARK_EVERY_S = 1.0
RETRY_S = "15"
KEPT_PAUSES = 1000
MOST_LOSSES = 20
PASSED_HEADERS = ("content-type",)
"""The headers of a client's request that a replica needs."""


class Front:
    """Is the application of a cluster; `directory` and `desk` are set while it runs."""

    directory: Directory
    desk: VideoDesk

    def __init__(
        self, settings: ClusterSettings, own: StudioSettings, seating: ServeSeating, token: str
    ) -> None:
        self.settings = settings
        self.own = own
        self.pauses: list[float] = []
        self._seating = seating
        self._token = token
        self._about: bytes = b""
        fastapi = import_extra("fastapi", "recap serve", "studio")
        self.app: FastAPI = fastapi.FastAPI(
            title="recap serve", lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None
        )
        add_guard(self.app, own)
        add_errors(self.app)
        self.app.add_exception_handler(Busy, _refuse_for_now)
        add_own(self)
        add_videos(self)
        add_forwarding(self)
        add_page(self.app)

    @asynccontextmanager
    async def _life(self, _: Any) -> AsyncIterator[None]:
        aiohttp = import_extra("aiohttp", "recap serve", "ray")
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=600, sock_connect=5)
        ) as client:
            seats = Seats(self._seating, self.settings.seats, self.settings.queue)
            store = await asyncio.to_thread(open_store, self.settings.store)
            self.directory = Directory(self.settings, seats, store, client, self._token)
            replicas = max(self.settings.replicas, self.settings.most_replicas)
            self.desk = VideoDesk(self.directory, self.own.limits, replicas)
            await self.desk.load()
            parking = asyncio.create_task(self._park())
            yield
            parking.cancel()
            await self.desk.close()
            await asyncio.gather(parking, return_exceptions=True)
            # Closing keeps the present states, which makes the next opening quick.
            await self.directory.park_idle(-1.0)

    async def _park(self) -> None:
        while True:
            await asyncio.sleep(PARK_EVERY_S)
            await self.directory.park_idle(self.settings.idle_s)
            del self.pauses[:-KEPT_PAUSES]

    async def about(self) -> Any:
        """Describe this cluster; waits for the first replica."""
        from fastapi import Response

        if not self._about:
            status, body, _, _ = await self.directory.ask_any("GET", "/v1/about", b"", {})
            if status >= 400:
                return Response(body, status, media_type="application/json")
            plain = json.loads(body)
            plain["limits"] |= {
                "open_sessions": self.settings.seats,
                "kept_sessions": self.settings.kept_sessions,
            }
            self._about = json.dumps(plain).encode()
        return Response(self._about, media_type="application/json")

    async def metrics(self) -> Any:
        """Return the metrics of the front and of every replica that has a session."""
        from fastapi import Response

        directory = self.directory
        gauges = {
            "front_sessions": ("gauge", "Sessions that have a seat.", len(directory.sessions)),
            "front_seats": ("gauge", "Seats that there can be.", self.settings.seats),
            "front_waiting": ("gauge", "Requests that wait for a seat.", directory.seats.waiting),
            "front_refused_total": ("counter", "Requests that got no seat.", directory.seats.refused),
            "front_moves_total": ("counter", "Sessions that moved to another replica.", directory.moves),
            "front_parked_total": ("counter", "Sessions that were parked.", directory.parked),
            "front_videos": ("gauge", "Videos that are not finished.", self.desk.waiting),
            "front_pause_seconds_last": ("gauge", "The last viewer's pause.", (self.pauses or [0.0])[-1]),
        }
        own = [Metric(name, about, kind, value) for name, (kind, about, value) in gauges.items()]
        seats = {seat.address: seat for seat in directory.sessions.values() if not seat.gone.is_set()}
        texts = []
        for number, seat in enumerate(seats.values()):
            with suppress(Lost):
                _, body, _, _ = await directory.send(seat, "GET", "/metrics")
                texts.append((f"{number}@{seat.address.removeprefix('http://')}", body.decode()))
        return Response(as_text(own) + joined(texts), media_type="text/plain; version=0.0.4")


def joined(texts: list[tuple[str, str]]) -> str:
    """Join the metrics of replicas, each with a label that names its replica; those of one name stay together."""
    by_name: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for replica, text in texts:
        for line in text.splitlines():
            if line.startswith("#"):
                head = heads.setdefault(line.split()[2], [])
                head += [line] if line not in head else []
                continue
            metric, _, value = line.rpartition(" ")
            name, _, labels = metric.partition("{")
            label = f'replica="{replica}"' + (f",{labels}" if labels else "}")
            by_name.setdefault(name, []).append(f"{name}{{{label} {value}")
    return "".join("\n".join([*heads.get(name, []), *lines]) + "\n" for name, lines in by_name.items())


async def _refuse_for_now(_: Any, error: Exception) -> Any:
    from fastapi.responses import JSONResponse

    assert isinstance(error, Busy)
    return JSONResponse(error_event(error), status_code=503, headers={"retry-after": RETRY_S})


def add_own(front: Front) -> None:
    """Add the routes that the front answers itself."""
    app = front.app

    async def sessions() -> list[dict[str, Any]]:
        return await front.directory.list()

    async def close(name: str) -> dict[str, Any]:
        return await front.directory.close(name)

    async def delete(name: str) -> dict[str, Any]:
        return await front.directory.delete(name)

    async def health() -> dict[str, Any]:
        """Return how many sessions have a seat, as a sign of life."""
        return {"v": 1, "sessions": len(front.directory.sessions), "seats": front.settings.seats}

    app.add_api_route("/healthz", health)
    app.add_api_route("/metrics", front.metrics, response_model=None)
    app.add_api_route("/v1/about", front.about, response_model=None)
    app.add_api_route("/v1/sessions", sessions)
    app.add_api_route("/v1/sessions/{name}/close", close, methods=["POST"])
    app.add_api_route("/v1/sessions/{name}", delete, methods=["DELETE"])


def add_videos(front: Front) -> None:
    """Add the routes of videos for programs, which answer as a studio's do."""
    from fastapi import Request, Response

    own, settings = front.own, front.settings
    # As its replicas are set up, so that what they would refuse is refused at once.
    studio = settings.as_studio(own)

    async def create(request: Request) -> dict[str, Any]:
        asked = messages.read_message(await read_body(request, own.limits.message_bytes), messages.NewVideo)
        await asyncio.to_thread(check, asked)
        return await front.desk.create(asked)

    def check(asked: messages.NewVideo) -> None:
        with tempfile.TemporaryDirectory(prefix="recap-front-") as temporary:
            shelf = SharedShelf(Path(temporary), own.limits.casts, front.directory.store)
            check_video(studio, shelf, asked)

    async def videos() -> dict[str, Any]:
        return {"v": 1, "videos": front.desk.list()}

    async def show(name: str) -> dict[str, Any]:
        return front.desk.shown(name)

    async def content(name: str) -> Any:
        data = await front.desk.content(name)
        return Response(data, media_type="video/mp4", headers=saved_as(f"{name}.mp4"))

    async def delete(name: str) -> dict[str, Any]:
        await front.desk.delete(name)
        return {"v": 1, "id": name, "deleted": True}

    app = front.app
    app.add_api_route("/v1/videos", create, methods=["POST"], status_code=202)
    app.add_api_route("/v1/videos", videos)
    app.add_api_route("/v1/videos/{name}", show)
    app.add_api_route("/v1/videos/{name}/content", content, response_model=None)
    app.add_api_route("/v1/videos/{name}", delete, methods=["DELETE"])


def add_forwarding(front: Front) -> None:
    """Add the routes whose requests are forwarded to a replica."""
    from fastapi import Request, WebSocket

    app, limits = front.app, front.own.limits

    async def begin(request: Request) -> Any:
        """Begin a session on some replica."""
        upload = request.url.path.endswith("upload-run")
        body = await read_body(request, limits.upload_bytes if upload else limits.message_bytes)
        return as_response(await front.directory.begin(path_of(request), body, headers_of(request)))

    async def ask_any(request: Request) -> Any:
        """Ask any replica."""
        body = await read_body(request, limits.upload_bytes)
        path, headers = path_of(request), headers_of(request)
        return as_response(await front.directory.ask_any(request.method, path, body, headers))

    async def session(request: Request, name: str, rest: str = "") -> Any:
        """Forward a request to the replica that has the session."""
        body = await read_body(request, limits.message_bytes)
        return as_response(await forward(front.directory, request, name, rest, body))

    async def stream(socket: WebSocket, name: str) -> None:
        await socket.accept()
        await Relay(front.directory, socket, name, front.pauses).run()

    def add(path: str, act: Any, *methods: str) -> None:
        app.add_api_route(path, act, methods=list(methods), response_model=None)

    add("/v1/sessions", begin, "POST")
    add("/v1/sessions/upload-run", begin, "POST")
    add("/v1/casts", ask_any, "GET", "POST")
    add("/v1/casts/{name}", ask_any, "GET", "DELETE")
    add("/docs", ask_any, "GET")
    add("/openapi.json", ask_any, "GET")
    app.add_api_websocket_route("/v1/sessions/{name}/stream", stream)
    add("/v1/sessions/{name}", session, "GET")
    add("/v1/sessions/{name}/{rest:path}", session, "GET", "POST")


async def forward(directory: Directory, request: "Request", name: str, rest: str, body: bytes) -> Answer:
    """Ask the replica that has a session; requests that only read are repeated after a loss."""
    if rest == "commands":
        with suppress(ValueError, AttributeError):
            note_pause(directory, name, json.loads(body).get("type"))
    for _ in range(MOST_LOSSES):
        seat = await directory.find(name, reopen=rest == "open")
        try:
            return await directory.send(seat, request.method, path_of(request), body, headers_of(request))
        except Lost:
            if request.method == "POST" and rest != "open":
                limit = "its machine was lost before it answered, so it may have happened or not"
                raise busy(limit) from None
    raise busy("its replicas were lost one after another")


def as_response(answer: Answer) -> Any:
    """Return the answer of a replica as that of the front."""
    from fastapi import Response

    status, body, kind, headers = answer
    return Response(body, status, headers=headers, media_type=kind)


def path_of(request: "Request") -> str:
    """Return path and query of a request, unchanged."""
    query = request.scope.get("query_string", b"").decode("latin-1")
    raw = request.scope.get("raw_path") or request.url.path.encode()
    return str(raw.decode("latin-1").split("?")[0]) + (f"?{query}" if query else "")


def headers_of(request: "Request") -> dict[str, str]:
    return {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
