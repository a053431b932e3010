"""The server is the interface of a studio: JSON over HTTP for sessions and files, a WebSocket for the stream.

Annotations here are evaluated when a studio is opened, so that the package can be imported without FastAPI.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from recap.errors import RecapError, refuse
from recap.io.extras import import_extra
from recap.studio import messages
from recap.studio.engine import as_refusal
from recap.studio.exchange import export_run
from recap.studio.guard import add_guard
from recap.studio.hub import Subscriber, error_event
from recap.studio.live import LiveSession
from recap.studio.pages import add_page, reference_page
from recap.studio.segments import join_segments
from recap.studio.store import INFO, MEDIA, STRIP
from recap.studio.studio import Studio

if TYPE_CHECKING:
    from fastapi import APIRouter

KINDS = {"m4s": (MEDIA, "video/iso.segment"), "json": (INFO, ""), "jpg": (STRIP, "image/jpeg")}
"""The files of a block that a client can ask for."""


def make_app(studio: Studio) -> Any:
    """Make the application; it closes the studio when the server ends."""
    fastapi = import_extra("fastapi", "recap studio", "studio")

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(studio.close)

    # The usual page about an interface loads scripts from elsewhere; this one has its own.
    app = fastapi.FastAPI(title="recap studio", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    add_guard(app, studio.settings)
    add_errors(app)
    router = fastapi.APIRouter(prefix="/v1")
    # First: otherwise its fixed paths would match the parameters of other routes.
    add_exchange(router, studio)
    add_videos(router, studio)
    add_sessions(router, studio)
    add_files(router, studio)
    add_casts(router, studio)
    add_stream(router, studio)
    app.include_router(router)
    add_page(app)

    async def reference() -> Any:
        return fastapi.Response(reference_page(app.openapi()), media_type="text/html")

    app.add_api_route("/docs", reference, include_in_schema=False)
    return app


def add_errors(app: Any) -> None:
    """Answer every failure with its message, as JSON."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def refused(_: Request, error: Exception) -> JSONResponse:
        refusal = as_refusal(error)
        missing = "there is no such" in refusal.limit
        code = 404 if missing else 400 if isinstance(error, RecapError) else 500
        return JSONResponse(error_event(refusal), status_code=code)

    app.add_exception_handler(RecapError, refused)
    app.add_exception_handler(Exception, refused)


async def read_body(request: Any, most: int) -> bytes:
    """Read the body of a request, up to a limit."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise refuse("body", f"over {most} bytes", f"at most {most} bytes are read", "send less")
    return bytes(body)


def taking(kind: Any) -> dict[str, Any]:
    """Return what the page /docs says about a body that is checked by hand, with our own messages."""
    kinds = get_args(kind)
    schemas = [messages.checker(each).json_schema() for each in kinds or (kind,)]
    schema = {"oneOf": schemas} if kinds else schemas[0]
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def add_sessions(router: "APIRouter", studio: Studio) -> None:
    """Add the routes that begin, list, direct and end sessions."""
    from fastapi import Request

    limits = studio.settings.limits

    @router.get("/about")
    async def about() -> dict[str, Any]:
        """Describe this studio: its model, memories, rules, sizes and limits; waits for the model."""
        return await asyncio.to_thread(studio.about)

    @router.get("/sessions")
    async def sessions() -> list[dict[str, Any]]:
        """List all sessions, open ones and those on disk."""
        return await asyncio.to_thread(studio.list)

    @router.post("/sessions", status_code=201, openapi_extra=taking(messages.NewSession))
    async def create(request: Request) -> dict[str, Any]:
        """Begin a session."""
        new = messages.read_message(await read_body(request, limits.message_bytes), messages.NewSession)
        live = await asyncio.to_thread(studio.create, new)
        return await asyncio.to_thread(live.hello)

    @router.get("/sessions/{name}")
    async def show(name: str) -> dict[str, Any]:
        """Return the whole state of a session."""
        return await asyncio.to_thread(studio.find(name).hello)

    @router.post("/sessions/{name}/open")
    async def open_session(name: str) -> dict[str, Any]:
        """Open a session that is on disk."""
        live = await asyncio.to_thread(studio.open, name)
        return await asyncio.to_thread(live.hello)

    @router.post("/sessions/{name}/close")
    async def close_session(name: str) -> dict[str, Any]:
        """Close a session, which stays on disk."""
        await asyncio.to_thread(studio.find, name)
        await asyncio.to_thread(studio.close_session, name)
        return {"v": 1, "session": name, "open": False}

    @router.delete("/sessions/{name}")
    async def delete(name: str) -> dict[str, Any]:
        """Close a session and delete its files."""
        await asyncio.to_thread(studio.delete, name)
        return {"v": 1, "session": name, "deleted": True}

    @router.post("/sessions/{name}/commands", openapi_extra=taking(messages.Command))
    async def command(name: str, request: Request) -> dict[str, Any]:
        """Execute one command, as on the stream; answers when it is done."""
        live = studio.find(name)
        asked = messages.read_command(await read_body(request, limits.message_bytes))
        happened = await asyncio.wrap_future(studio.command(live, asked))
        return {"v": 1, "type": "done", "id": asked.id, **happened}


def add_files(router: "APIRouter", studio: Studio) -> None:
    """Add the routes by which everything that was generated can be fetched again."""
    from fastapi import Response

    def find(name: str, track: str, branch: int) -> LiveSession:
        live = studio.find(name)
        live.check_video(track, branch)
        return live

    @router.get("/sessions/{name}/tracks/{track}/branches/{branch}/init.mp4")
    async def init(name: str, track: str, branch: int) -> Response:
        """Return the beginning of a track's video."""
        live = find(name, track, branch)
        data = await asyncio.to_thread(live.store.read_init, track, branch)
        return Response(data, media_type="video/mp4")

    @router.get("/sessions/{name}/tracks/{track}/branches/{branch}/blocks/{block}.{kind}")
    async def piece(name: str, track: str, branch: int, block: int, kind: str) -> Response:
        """Return a file of a block: its video, all that is known of it, or its pictures."""
        live = find(name, track, branch)
        if kind not in KINDS or block < 0:
            limit = f"there is no such file; kinds: {', '.join(KINDS)}"
            raise refuse("kind", kind, limit, "name one of them")
        suffix, media = KINDS[kind]
        if suffix == INFO:
            info = await asyncio.to_thread(live.store.read_info, track, branch, block)
            return Response(json.dumps(info), media_type="application/json")
        data = await asyncio.to_thread(live.store.read, track, branch, block, suffix)
        return Response(data, media_type=media)


def add_casts(router: "APIRouter", studio: Studio) -> None:
    """Add the routes of the shelf."""
    from fastapi import Request, Response

    limits = studio.settings.limits

    @router.get("/casts")
    async def casts() -> dict[str, Any]:
        """List the subjects on the shelf."""
        return {"v": 1, "casts": await asyncio.to_thread(studio.shelf.shown_all)}

    @router.post("/casts", status_code=201)
    async def upload(request: Request) -> dict[str, Any]:
        """Put the subjects of a cast file, the body, on the shelf."""
        data = await read_body(request, limits.upload_bytes)
        await asyncio.to_thread(studio.folder.check_room)
        return {"v": 1, "casts": await asyncio.to_thread(studio.shelf.upload, data)}

    @router.get("/casts/{name}.cast")
    async def download(name: str) -> Response:
        """Return a subject as a cast file."""
        data = await asyncio.to_thread(studio.shelf.path(name).read_bytes)
        return Response(data, media_type="application/octet-stream", headers=saved_as(f"{name}.cast"))

    @router.delete("/casts/{name}")
    async def delete(name: str) -> dict[str, Any]:
        """Take a subject off the shelf."""
        await asyncio.to_thread(studio.shelf.delete, name)
        return {"v": 1, "name": name, "deleted": True}

    @router.post("/sessions/{name}/casts", status_code=201, openapi_extra=taking(messages.NewSubject))
    async def save(name: str, request: Request) -> dict[str, Any]:
        """Keep a subject of a session on the shelf."""
        live = studio.find(name)
        asked = messages.read_message(await read_body(request, limits.message_bytes), messages.NewSubject)
        return {"v": 1, **await asyncio.to_thread(studio.save_subject, live, asked)}


def add_exchange(router: "APIRouter", studio: Studio) -> None:
    """Add the routes of downloads and uploads."""
    from fastapi import Request, Response

    @router.get("/sessions/{name}/video.mp4")
    async def video(name: str, track: str = messages.MAIN, branch: int | None = None) -> Response:
        """Return a branch as one video file."""
        live = studio.find(name)
        number = live.record.current if branch is None else branch
        data = await asyncio.to_thread(joined_video, live, track, number)
        return Response(data, media_type="video/mp4", headers=saved_as(f"{name}.mp4"))

    @router.get("/sessions/{name}/run.zip")
    async def run(name: str, track: str = messages.MAIN, more_s: float = 10.0) -> Response:
        """Return the current branch as a zipped run folder."""
        live = studio.find(name)
        most = studio.settings.limits.session_seconds
        if not 0 <= more_s <= most:
            raise refuse("more_s", more_s, f"must be 0 to {most:g}", "10 is the default")
        data = await asyncio.to_thread(export_run, live, studio.engine, track, more_s)
        return Response(data, media_type="application/zip", headers=saved_as(f"{name}.zip"))

    @router.post("/sessions/upload-run", status_code=201)
    async def upload(request: Request) -> dict[str, Any]:
        """Open a zipped run folder, the body, as a session."""
        data = await read_body(request, studio.settings.limits.upload_bytes)
        live = await asyncio.to_thread(studio.upload, data)
        return await asyncio.to_thread(live.hello)


def joined_video(live: LiveSession, track: str, branch: int) -> bytes:
    """Return all of a branch as one file."""
    init, pieces = live.media(track, branch)
    with tempfile.TemporaryDirectory(prefix="recap-studio-") as folder:
        path = Path(folder) / "video.mp4"
        join_segments(init, pieces, path)
        return path.read_bytes()


def add_videos(router: "APIRouter", studio: Studio) -> None:
    """Add the routes of videos for programs: create, poll, download."""
    from fastapi import Request, Response

    @router.post("/videos", status_code=202, openapi_extra=taking(messages.NewVideo))
    async def create(request: Request) -> dict[str, Any]:
        """Queue a video."""
        body = await read_body(request, studio.settings.limits.message_bytes)
        return await asyncio.to_thread(studio.create_video, messages.read_message(body, messages.NewVideo))

    @router.get("/videos")
    async def videos() -> dict[str, Any]:
        """List all videos."""
        return {"v": 1, "videos": studio.videos.list()}

    @router.get("/videos/{name}")
    async def show(name: str) -> dict[str, Any]:
        """Describe a video and its progress."""
        return studio.videos.find(name).shown()

    @router.get("/videos/{name}/content")
    async def content(name: str) -> Response:
        """Return the file of a finished video."""
        data = await asyncio.to_thread(studio.videos.content, name)
        return Response(data, media_type="video/mp4", headers=saved_as(f"{name}.mp4"))

    @router.delete("/videos/{name}")
    async def delete(name: str) -> dict[str, Any]:
        """Delete a video, or stop it."""
        await asyncio.to_thread(studio.videos.delete, name)
        return {"v": 1, "id": name, "deleted": True}


def saved_as(name: str) -> dict[str, str]:
    """Return the header by which a browser saves an answer under a name."""
    return {"content-disposition": f'attachment; filename="{name}"'}


def add_stream(router: "APIRouter", studio: Studio) -> None:
    """Add the WebSocket on which a session is watched and directed."""
    from fastapi import WebSocket, WebSocketDisconnect

    @router.websocket("/sessions/{name}/stream")
    async def stream(socket: WebSocket, name: str) -> None:
        await socket.accept()
        subscriber = Subscriber(asyncio.get_running_loop())
        try:
            live = studio.find(name)
            hello = await asyncio.to_thread(live.join, subscriber)
        except RecapError as error:
            await socket.send_text(json.dumps(error_event(error)))
            await socket.close(1008)
            return
        sending = asyncio.create_task(_send(socket, subscriber, hello))
        try:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                data = message.get("text") or message.get("bytes") or b""
                await _answer(studio, live, subscriber, data)
        except (WebSocketDisconnect, RuntimeError):
            # The other side is gone; the session stays.
            pass
        finally:
            live.hub.leave(subscriber)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _send(socket: Any, subscriber: Subscriber, hello: dict[str, Any]) -> None:
    """Send all events to one viewer, in order."""
    # A viewer who closes the tab meanwhile is no failure; the reader of the socket ends it.
    with suppress(Exception):
        await socket.send_text(json.dumps(hello))
        while (event := await subscriber.next()) is not None:
            await (socket.send_text(event) if isinstance(event, str) else socket.send_bytes(event))
        await socket.close(1001)


async def _answer(studio: Studio, live: LiveSession, subscriber: Subscriber, data: str | bytes) -> None:
    """Execute one message; only its sender gets the answer."""
    mark = ""
    try:
        if len(data) > studio.settings.limits.message_bytes:
            most = studio.settings.limits.message_bytes
            raise refuse("message", f"{len(data)} bytes", f"at most {most} bytes are read", "send less")
        command = messages.read_command(data)
        mark = command.id[:200]
        done = studio.command(live, command)
    except RecapError as error:
        subscriber.offer(json.dumps(error_event(error, mark)))
        return
    quiet = isinstance(command, messages.PlayheadMessage)

    def send_answer(future: Any) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            subscriber.offer(json.dumps(error_event(as_refusal(error), mark)))
        elif not quiet:
            subscriber.offer(json.dumps({"v": 1, "type": "done", "id": mark, **future.result()}))

    done.add_done_callback(send_answer)
