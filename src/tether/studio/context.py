"""The context of every route: the workspace, the person who sent the request, and the stateful parts of the server."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from tether.store.read import OpenWorkspace
from tether.studio.import_export import Imports
from tether.studio.label_store import Labels, VoteWriter
from tether.studio.launcher import Launcher
from tether.studio.metric_cache import MetricCache
from tether.studio.model_host import ModelHost
from tether.studio.people import Auth, Entry, Person, Streams
from tether.studio.run_queries import Diagnoses, PromptIndex
from tether.studio.settings import StudioSettings


@dataclass(frozen=True)
class Studio:
    """The parts of one server."""

    opened: OpenWorkspace
    settings: StudioSettings
    labels: Labels
    vote_writer: VoteWriter
    imports: Imports
    metrics: MetricCache
    doctor: Diagnoses
    prompts: PromptIndex
    launcher: Launcher
    models: ModelHost
    auth: Auth
    streams: Streams


def studio_of(request: Request) -> Studio:
    """The server of a request."""
    return request.app.state.studio


def person_of(request: Request) -> Person:
    """The person who sent the request; the auth layer has checked it."""
    return request.state.person


def entry_of(request: Request) -> Entry:
    """How the person was identified."""
    return request.state.entry


def link_for(request: Request, token: str) -> str:
    """A link for logging in. Browsers do not send the part after # to any server."""
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return f"{studio_of(request).settings.public_url or own}/#token={token}"
