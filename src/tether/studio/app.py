"""The Studio application: its workspace, its middleware, its routes and static files.

Static files are found in a list that is made once. A path that is not in the list does not exist.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tether import __version__
from tether.store.database.open import Workspace
from tether.store.read import OpenWorkspace, open_store, open_workspace
from tether.studio import chat_routes, label_routes, run_routes, sweep_routes, train_routes
from tether.studio.auth import AuthMiddleware
from tether.studio.context import Studio
from tether.studio.import_export import Imports
from tether.studio.label_store import Labels, VoteWriter
from tether.studio.launcher import Launcher
from tether.studio.metric_cache import MetricCache
from tether.studio.model_host import ModelHost
from tether.studio.people import Auth, Streams
from tether.studio.replies import Reply, add_error_replies
from tether.studio.run_queries import Diagnoses, PromptIndex
from tether.studio.settings import StudioSettings

FOLDER = Path(__file__).parent / "static"

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}


@dataclass(frozen=True)
class StaticFiles:
    """The files in a folder by URL path. Nothing from a request is ever joined to a path."""

    folder: Path = FOLDER

    def find(self, address: str) -> Path | None:
        """The file at a URL path; `/` is the page itself."""
        return self._known.get("index.html" if address in ("", "/") else address.removeprefix("/"))

    def content(self, path: Path) -> tuple[bytes, str]:
        """The content of a file and its ETag, read once: the page opens even if every thread waits for the database."""
        if path not in self._read:
            found = path.read_bytes()
            self._read[path] = found, f'"{hashlib.sha256(found).hexdigest()[:32]}"'
        return self._read[path]

    @cached_property
    def _read(self) -> dict[Path, tuple[bytes, str]]:
        return {}

    @cached_property
    def _known(self) -> dict[str, Path]:
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {path.relative_to(self.folder).as_posix(): path for path in files}


FILES = StaticFiles()
static_router = APIRouter(include_in_schema=False)


@static_router.api_route("/{address:path}", methods=["GET", "HEAD"])
async def static_file(request: Request, address: str) -> Response:
    """A file of the page."""
    found = FILES.find(address)
    if found is None or address.startswith("api/") or address == "api":
        return Reply({"error": "there is nothing at this address"}, 404)
    kind = KINDS.get(found.suffix) or mimetypes.guess_type(found.name)[0] or "application/octet-stream"
    content, tag = FILES.content(found)
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})


# -- the application ----------------------------------------------------------------------------------------------

KEPT_CONNECTIONS = 8
ROUTERS = (
    *(run_routes.router, run_routes.stream_router, sweep_routes.router, label_routes.router),
    train_routes.launch_router,
    *(label_routes.item_router, train_routes.router, chat_routes.router, label_routes.session_router),
)


def create_app(workspace: Workspace, settings: StudioSettings) -> FastAPI:
    """The server of one workspace. Its database is opened here, and created if needed."""
    studio = open_studio(workspace, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        studio.imports.close()
        studio.vote_writer.close()
        studio.auth.close()
        studio.opened.close()

    app = FastAPI(
        title="Tether Studio",
        version=__version__,
        description="Runs, tokens, votes and models of one workspace. Send `Authorization: Bearer TOKEN`.",
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's own pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.studio = studio
    add_error_replies(app)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(static_router)  # last: it takes every address that is left
    app.add_middleware(AuthMiddleware, settings=settings, auth=studio.auth)
    return app


def open_studio(workspace: Workspace, settings: StudioSettings) -> Studio:
    """Create the parts of a server."""
    engine = open_store(workspace, kept=KEPT_CONNECTIONS)
    open_workspace(workspace.directory, _url(workspace)).close()  # writes the spooled records of ended runs
    opened = OpenWorkspace(workspace, engine)
    labels, metrics = Labels(opened), MetricCache(opened)
    auth = Auth(
        labels.owner(),
        owner_token=settings.owner_token,
        login_code=settings.login_code,
        token_logs_in=settings.token_logs_in,
        find_rater=labels.rater_by_hash,
    )
    labels.clear_stages()
    return Studio(
        opened=opened,
        settings=settings,
        labels=labels,
        vote_writer=VoteWriter(labels),
        imports=Imports(labels),
        metrics=metrics,
        doctor=Diagnoses(opened, metrics),
        prompts=PromptIndex(opened),
        launcher=Launcher(workspace.directory),
        models=ModelHost(),
        auth=auth,
        streams=Streams(settings.max_streams),
    )


def _url(workspace: Workspace) -> str:
    return workspace.url.render_as_string(hide_password=False)
