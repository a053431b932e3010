"""This module serves a study and collects its votes, behind the same guard as the studio.

Annotations here are evaluated when a study is served, so that the package can be imported without FastAPI.
"""

import asyncio
import mimetypes
from collections.abc import Collection
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.eval.study.box import BallotBox
from recap.io.extras import import_extra
from recap.studio.guard import add_guard
from recap.studio.server import add_errors, read_body
from recap.studio.settings import StudioSettings

MOST_BODY_BYTES = 256 * 1024


def make_voting_app(folder: Path, names: Collection[str], box: BallotBox, settings: StudioSettings) -> Any:
    """Make the application; `names` are the files of the folder that it shows, and no other can be asked for."""
    fastapi = import_extra("fastapi", "recap study serve", "studio")
    from fastapi import Request, Response
    from fastapi.responses import FileResponse

    app = fastapi.FastAPI(title="recap study", docs_url=None, redoc_url=None, openapi_url=None)
    add_guard(app, settings)
    add_errors(app)
    files = {name: folder / name for name in names}
    one_at_a_time = asyncio.Lock()

    async def study() -> dict[str, Any]:
        """Return which study this is, and which sheet a new rater should take."""
        return {"v": 1, "study": box.study.digest, "sheet": box.least_used_sheet()}

    async def votes(request: Request) -> dict[str, Any]:
        """Take votes: lines as the page wrote them."""
        body = await read_body(request, MOST_BODY_BYTES)
        async with one_at_a_time:
            try:
                return {"v": 1, "kept": await asyncio.to_thread(box.add, body)}
            except OSError as error:
                limit = "the votes could not be written"
                remedy = "make room there, then send them again"
                raise refuse("disk", error.strerror or "error", limit, remedy) from error

    async def file(name: str) -> Response:
        path = files.get(name or "index.html")
        if path is None:
            raise refuse("file", name[:100], "there is no such file in the study", "begin at /")
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return FileResponse(path, media_type=kind)

    # Last, since it matches every path.
    app.add_api_route("/v1/study", study)
    app.add_api_route("/v1/votes", votes, methods=["POST"])
    app.add_api_route("/{name:path}", file, response_model=None)
    return app
