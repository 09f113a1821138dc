"""Owners and annotators, identified by a session cookie or a token; their sessions and live streams.

The number of sessions is limited per person, so that no one can push out the sessions of another. Nothing here waits
for the database on the event loop. The owner's token is compared in memory. An annotator's token is looked up in a
thread and cached for some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tether.errors import StorageError
from tether.studio.replies import Refused

SESSION_SECONDS = 7 * 24 * 3600.0
MAX_PER_PERSON = 20
MAX_AGENT = 200  # characters of the browser's name


@dataclass
class LoginSession:
    """A logged-in browser. Its times are from the monotonic clock, because the wall clock may be changed."""

    key: str  # the hash of the cookie's value
    id: str  # for listing and ending it; it cannot be used to log in
    person: Person
    began: float
    seen: float
    address: str
    agent: str
    hashed: str | None  # hash of the token it was opened with; None: the owner's

    @property
    def ends(self) -> float:
        """When it expires."""
        return self.began + SESSION_SECONDS


class Sessions:
    """Sessions in memory. Beyond `MAX_PER_PERSON`, the least recently used session of the same person ends."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, LoginSession] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, person: Person, address: str, agent: str, hashed: str | None = None) -> str:
        """Start a session; returns the cookie's value."""
        secret, now = secrets.token_urlsafe(32), time.monotonic()
        key = _key(secret)
        agent = "".join(letter for letter in agent[:MAX_AGENT] if letter.isprintable())
        with self._lock:
            mine = [one for one in self._sessions.values() if one.person.id == person.id]
            ended = [one for one in self._sessions.values() if one.ends <= now]
            surplus = sorted(mine, key=lambda one: one.seen)[: max(0, len(mine) + 1 - MAX_PER_PERSON)]
            for one in (*ended, *surplus):
                self._sessions.pop(one.key, None)
            self._sessions[key] = LoginSession(key, secrets.token_hex(8), person, now, now, address, agent, hashed)
        return secret

    def find(self, secret: str) -> LoginSession | None:
        """The session of a cookie, marked as used now."""
        found = self.with_key(_key(secret))
        if found is not None:
            found.seen = time.monotonic()
        return found

    def with_key(self, key: str) -> LoginSession | None:
        """A session that has not ended."""
        found = self._sessions.get(key)
        return found if found is not None and found.ends > time.monotonic() else None

    def listed(self, mine: str | None = None) -> list[dict[str, Any]]:
        """Every session, the most recently used first; `mine` is the key of the current one."""
        now, wall = time.monotonic(), time.time()
        with self._lock:
            there = sorted((one for one in self._sessions.values() if one.ends > now), key=lambda one: -one.seen)
        return [
            {
                "id": one.id,
                "person": one.person.id,
                "name": one.person.name,
                "role": one.person.role,
                "began": wall - (now - one.began),
                "seen": wall - (now - one.seen),
                "ends": wall + (one.ends - now),
                "address": one.address,
                "browser": one.agent,
                "this": one.key == mine,
            }
            for one in there
        ]

    def end(self, session: str) -> LoginSession | None:
        """End the session with a listed id."""
        with self._lock:
            found = next((one for one in self._sessions.values() if one.id == session), None)
            return None if found is None else self._sessions.pop(found.key)

    def end_key(self, key: str) -> None:
        """End the session with a key."""
        with self._lock:
            self._sessions.pop(key, None)

    def end_person(self, person: int) -> int:
        """End all sessions of a person; returns their number."""
        with self._lock:
            theirs = [key for key, one in self._sessions.items() if one.person.id == person]
            for key in theirs:
                del self._sessions[key]
        return len(theirs)

    def end_token(self, hashed: str) -> None:
        """End all sessions that were opened with a token."""
        with self._lock:
            for key in [key for key, one in self._sessions.items() if one.hashed == hashed]:
                del self._sessions[key]


def _key(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


# -- live streams -------------------------------------------------------------------------------------------------


class Streams:
    """Limits the live streams of each person. A stream counts from its request on, so the limit cannot be exceeded."""

    def __init__(self, limit: int) -> None:
        self._limit, self._open, self._lock = limit, Counter[int](), Lock()

    def enter(self, person: int) -> StreamPlace:
        """Take a place; the caller must leave it."""
        with self._lock:
            if self._open[person] >= self._limit:
                raise Refused(429, f"at most {self._limit} live streams at a time: close a page")
            self._open[person] += 1
        return StreamPlace(self, person)

    def leave(self, person: int) -> None:
        """Free a place."""
        with self._lock:
            self._open[person] -= 1
            if self._open[person] <= 0:
                del self._open[person]


class StreamPlace:
    """One of a person's streams. Leaving it more than once counts once."""

    def __init__(self, streams: Streams, person: int) -> None:
        self._streams, self._person, self._taken = streams, person, True

    def leave(self) -> None:
        """Free the place."""
        if self._taken:
            self._taken = False
            self._streams.leave(self._person)


class EventStream(StreamingResponse):
    """Server-sent events; the place is freed when the stream ends in any way, also before its first event."""

    def __init__(self, body: AsyncIterator[str], place: StreamPlace) -> None:
        super().__init__(body, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._body, self._place = body, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        body: Any = self._body
        try:
            async with aclosing(body):
                await super().__call__(scope, receive, send)
        finally:
            self._place.leave()


# -- people and their tokens --------------------------------------------------------------------------------------

Role = Literal["owner", "annotator"]

INVITED = re.compile(r"[A-Za-z0-9_-]{43}")  # tokens that are made for people: 256 bits in base64
KNOWN_SECONDS = 10.0  # until a person is looked up again: another server may have revoked them
MAX_KNOWN = 10_000
LOOKUPS = 4  # threads
MAX_WAITING = 64  # lookups
LOOKUP_SECONDS = 5.0


@dataclass(frozen=True)
class Person:
    """A person who may log in; `id` is their rater row, `queue_id` the only queue they may see."""

    id: int
    name: str
    role: Role
    queue_id: int | None = None


@dataclass(frozen=True)
class Entry:
    """How a person was identified: by a session, by their own token, or (neither) by the server's token."""

    person: Person
    session: str | None = None
    hashed: str | None = None


class CannotTellError(Exception):
    """The owner of a token cannot be determined now."""


class OtherPersonError(Exception):
    """The token belongs to another person than the browser's session."""


def token_hash(token: str) -> str:
    """The stored hash of a token. Tokens are 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class _Known:
    person: Person
    checked: float


class Auth:
    """Maps tokens to people and people to sessions. Sessions are in memory and end with the server."""

    def __init__(
        self,
        owner: Person,
        *,
        owner_token: str,
        login_code: str | None,
        token_logs_in: bool,
        find_rater: Callable[[str], Person | None],
    ) -> None:
        self._owner, self._owner_token = owner, owner_token
        self._login_code, self._token_logs_in = login_code, token_logs_in
        self._find_rater_by_hash = find_rater
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by the hash of their token
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="who")
        self._waiting = 0
        self._revocations = 0
        self.sessions = Sessions()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- tokens -------------------------------------------------------------------------------------------------

    async def by_token(self, token: str) -> Entry | None:
        """The person of a token that a script sends."""
        if _same(token, self._owner_token):
            return Entry(self._owner)
        hashed = token_hash(token)
        person = await self._rater(hashed) if INVITED.fullmatch(token) else None
        return None if person is None else Entry(person, hashed=hashed)

    async def log_in(
        self, token: str, address: str = "", agent: str = "", *, still: Person | None = None
    ) -> str | None:
        """Start a session for the token of a link; None if it is unknown or was already used.

        `still` is the person that the browser is logged in as: the token of anyone else raises OtherPersonError.
        """
        with self._lock:
            if self._login_code is not None and _same(token, self._login_code):
                _check_same(self._owner, still)
                self._login_code = None
                return self.sessions.begin(self._owner, address, agent)
        if _same(token, self._owner_token):
            if not self._token_logs_in:
                return None
            _check_same(self._owner, still)
            return self.sessions.begin(self._owner, address, agent)
        entry = await self.by_token(token)
        if entry is None:
            return None
        _check_same(entry.person, still)
        return self.sessions.begin(entry.person, address, agent, entry.hashed)

    async def _rater(self, hashed: str) -> Person | None:
        known = self._known.get(hashed)
        if known is not None:
            self._check_again(hashed, known)
            return known.person
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._look(hashed)), LOOKUP_SECONDS)
        except (StorageError, TimeoutError):
            raise CannotTellError from None

    def _look(self, hashed: str) -> Future[Person | None]:
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise CannotTellError
            self._waiting += 1
        looking = self._threads.submit(self._find, hashed)
        looking.add_done_callback(self._looked)
        return looking

    def _looked(self, _: Future[Person | None]) -> None:
        with self._lock:
            self._waiting -= 1

    def _find(self, hashed: str) -> Person | None:
        """Look the token up in the database and cache the result; a removed person loses their sessions."""
        before = self._revocations
        person = self._find_rater_by_hash(hashed)
        with self._lock:
            self._known.pop(hashed, None)
            if person is not None and self._revocations == before:  # else the result may be outdated
                self._known[hashed] = _Known(person, time.monotonic())
                while len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        if person is None:
            self.sessions.end_token(hashed)
        return person

    def _check_again(self, hashed: str, known: _Known) -> None:
        """Look a person up again after a while, in the background; they stay logged in while the database is away."""
        if time.monotonic() - known.checked < KNOWN_SECONDS:
            return
        known.checked = time.monotonic()
        with contextlib.suppress(CannotTellError):
            self._look(hashed)  # its result is cached, and a failure is retried

    # -- sessions -----------------------------------------------------------------------------------------------

    def by_session(self, secret: str) -> Entry | None:
        """The person of a session cookie."""
        found = self.sessions.find(secret)
        if found is None:
            return None
        self._check_token(found)
        return Entry(found.person, session=found.key)

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is still valid; a live stream checks this from time to time."""
        if entry.session is not None:
            found = self.sessions.with_key(entry.session)
            if found is not None:
                self._check_token(found)
            return found is not None
        if entry.hashed is None:
            return True
        known = self._known.get(entry.hashed)
        if known is not None:
            self._check_again(entry.hashed, known)
        return known is not None

    def forget(self, person: int) -> int:
        """Log out a person whose token was revoked; returns the number of ended sessions."""
        with self._lock:
            self._revocations += 1
            for hashed in [hashed for hashed, known in self._known.items() if known.person.id == person]:
                del self._known[hashed]
        return self.sessions.end_person(person)

    def _check_token(self, session: LoginSession) -> None:
        if session.hashed is None:
            return
        known = self._known.setdefault(session.hashed, _Known(session.person, time.monotonic()))
        self._check_again(session.hashed, known)


def _check_same(person: Person, still: Person | None) -> None:
    if still is not None and still.id != person.id:
        raise OtherPersonError


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
