"""The application: the workspace behind it, the gate before it, and its routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tether import __version__
from tether.store.database.open import Workspace
from tether.store.read import OpenWorkspace, open_store, open_workspace
from tether.studio import (
    chat_routes,
    item_routes,
    label_routes,
    launch_routes,
    run_routes,
    session_routes,
    static_files,
    stream,
    train_routes,
)
from tether.studio.auth import Gate
from tether.studio.context import Studio
from tether.studio.diagnoses import Consultations
from tether.studio.imports import Imports
from tether.studio.label_store import Labels
from tether.studio.launcher import Launcher
from tether.studio.metric_cache import MetricCache
from tether.studio.model_host import ModelHost
from tether.studio.people import Auth
from tether.studio.replies import add_error_replies
from tether.studio.rollout_view import PromptIndex
from tether.studio.settings import StudioSettings
from tether.studio.stream_count import Streams
from tether.studio.vote_writer import VoteWriter

KEPT_CONNECTIONS = 8
ROUTERS = (
    *(run_routes.router, stream.router, label_routes.router, launch_routes.router),
    *(item_routes.router, train_routes.router, chat_routes.router, session_routes.router),
)


def create_app(workspace: Workspace, settings: StudioSettings) -> FastAPI:
    """The server over one workspace. Its database is opened here and made if need be."""
    studio = open_studio(workspace, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        studio.imports.close()
        studio.desk.close()
        studio.door.close()
        studio.opened.close()

    app = FastAPI(
        title="Tether Studio",
        version=__version__,
        description="Runs, tokens, votes and models of one workspace. Send `Authorization: Bearer TOKEN`.",
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # the pages that FastAPI has for this load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.studio = studio
    add_error_replies(app)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(static_files.router)  # last: it takes every address that is left
    app.add_middleware(Gate, settings=settings, auth=studio.door)
    return app


def open_studio(workspace: Workspace, settings: StudioSettings) -> Studio:
    """The parts of a server."""
    engine = open_store(workspace, kept=KEPT_CONNECTIONS)
    open_workspace(workspace.directory, _url(workspace)).close()  # takes in what ended runs could not write
    opened = OpenWorkspace(workspace, engine)
    labels, metrics = Labels(opened), MetricCache(opened)
    door = Auth(
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
        desk=VoteWriter(labels),
        imports=Imports(labels),
        metrics=metrics,
        doctor=Consultations(opened, metrics),
        prompts=PromptIndex(opened),
        launcher=Launcher(workspace.directory),
        models=ModelHost(),
        door=door,
        streams=Streams(settings.most_streams),
    )


def _url(workspace: Workspace) -> str:
    return workspace.url.render_as_string(hide_password=False)
