"""What every route works with: the workspace, who is asking, and the parts of the server that remember something."""

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
from tether.studio.run_queries import Consultations, PromptIndex
from tether.studio.settings import StudioSettings


@dataclass(frozen=True)
class Studio:
    """One server's parts."""

    opened: OpenWorkspace
    settings: StudioSettings
    labels: Labels
    vote_writer: VoteWriter
    imports: Imports
    metrics: MetricCache
    doctor: Consultations
    prompts: PromptIndex
    launcher: Launcher
    models: ModelHost
    auth: Auth
    streams: Streams


def studio_of(request: Request) -> Studio:
    """The server that a request came to."""
    return request.app.state.studio


def person_of(request: Request) -> Person:
    """Who is asking; the gate let no one else through."""
    return request.state.person


def entry_of(request: Request) -> Entry:
    """How they came in."""
    return request.state.entry


def link_for(request: Request, token: str) -> str:
    """A link by which someone enters. Browsers send what stands after # to no one."""
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return f"{studio_of(request).settings.public_url or own}/#token={token}"
