"""The routes by which people are put out: sessions that are open, and tokens that count no more."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Request
from starlette.concurrency import run_in_threadpool

from tether.studio.context import entry_of, link_for, person_of, studio_of
from tether.studio.replies import BIGGEST, Refused, Reply, api_router

router = api_router()

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
SessionId = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]


@router.post("/logout")
async def log_out(request: Request) -> Any:
    """End one's own session."""
    entry = entry_of(request)
    if entry.session is not None:
        studio_of(request).door.sessions.end_key(entry.session)
    return Reply({"ended": entry.session is not None})


@router.get("/sessions")
async def sessions(request: Request) -> Any:
    """Every session that is open, with whose it is; the one used last first."""
    return Reply({"sessions": studio_of(request).door.sessions.listed(entry_of(request).session)})


@router.post("/sessions/{session}/end")
async def end_session(request: Request, session: SessionId) -> Any:
    """End a session. Whose it was can enter again with their link."""
    ended = studio_of(request).door.sessions.end(session)
    if ended is None:
        raise Refused(404, "there is no such session: it may have ended by itself")
    return Reply({"id": session, "person": ended.person.id})


@router.post("/raters/{rater}/revoke")
async def revoke(request: Request, rater: Id) -> Any:
    """Make a person's link worthless, and end their sessions. Their votes stay."""
    studio = studio_of(request)
    await run_in_threadpool(studio.labels.revoke, person_of(request), rater)
    return Reply({"id": rater, "sessions": studio.door.forget(rater)})


@router.post("/raters/{rater}/link")
async def new_link(request: Request, rater: Id) -> Any:
    """Another link for a person, told this once; the one before is worthless, and their sessions end."""
    studio = studio_of(request)
    person, token = await run_in_threadpool(studio.labels.new_token, person_of(request), rater)
    studio.door.forget(rater)
    return Reply({"id": person.id, "name": person.name, "token": token, "link": link_for(request, token)})
