"""Owners and annotators, known by a session's cookie or a token; their sessions and streams.

The sessions of a server: so many for each person, so that no one can push another out.

How many live streams each person has open.

Who is asking: the owner or an annotator, known by a session's cookie or by a token.

Nothing here waits for the database on the event loop. What the owner shows is compared in memory; whose token an
annotator shows is looked up in a thread, and known for some seconds after that.
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
    """A browser that someone entered with. Its times are the monotonic clock's: the wall clock may be moved."""

    key: str  # the hash of what the cookie holds
    id: str  # by which it is listed and ended; no one can enter with it
    person: Person
    began: float
    seen: float
    address: str
    agent: str
    hashed: str | None  # of the token that it was opened with; None: the owner's

    @property
    def ends(self) -> float:
        """When it ends by itself."""
        return self.began + SESSION_SECONDS


class Sessions:
    """In memory. One more than `MAX_PER_PERSON` ends the same person's session that was used longest ago."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, LoginSession] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, person: Person, address: str, agent: str, hashed: str | None = None) -> str:
        """A new session; what its cookie holds."""
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
        """The session of a cookie, which is used now."""
        found = self.with_key(_key(secret))
        if found is not None:
            found.seen = time.monotonic()
        return found

    def with_key(self, key: str) -> LoginSession | None:
        """A session that has not ended."""
        found = self._sessions.get(key)
        return found if found is not None and found.ends > time.monotonic() else None

    def listed(self, mine: str | None = None) -> list[dict[str, Any]]:
        """Every session, the one used last first; `mine` is the key of the one who asks."""
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
        """End the session that is listed under an id."""
        with self._lock:
            found = next((one for one in self._sessions.values() if one.id == session), None)
            return None if found is None else self._sessions.pop(found.key)

    def end_key(self, key: str) -> None:
        """End one's own."""
        with self._lock:
            self._sessions.pop(key, None)

    def end_person(self, person: int) -> int:
        """End all that a person has; how many that were."""
        with self._lock:
            theirs = [key for key, one in self._sessions.items() if one.person.id == person]
            for key in theirs:
                del self._sessions[key]
        return len(theirs)

    def end_token(self, hashed: str) -> None:
        """End all that were opened with a token."""
        with self._lock:
            for key in [key for key, one in self._sessions.items() if one.hashed == hashed]:
                del self._sessions[key]


def _key(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Streams:
    """Counts from the moment a stream is asked for, so that no two requests are given the last place."""

    def __init__(self, limit: int) -> None:
        self._limit, self._open, self._lock = limit, Counter[int](), Lock()

    def enter(self, person: int) -> StreamPlace:
        """Take a place, which has to be left."""
        with self._lock:
            if self._open[person] >= self._limit:
                raise Refused(429, f"at most {self._limit} live streams at a time: close a page")
            self._open[person] += 1
        return StreamPlace(self, person)

    def leave(self, person: int) -> None:
        """Let another have a place."""
        with self._lock:
            self._open[person] -= 1
            if self._open[person] <= 0:
                del self._open[person]


class StreamPlace:
    """One of a person's streams. It can be left more than once, and counts once."""

    def __init__(self, streams: Streams, person: int) -> None:
        self._streams, self._person, self._taken = streams, person, True

    def leave(self) -> None:
        """Leave it."""
        if self._taken:
            self._taken = False
            self._streams.leave(self._person)


class EventStream(StreamingResponse):
    """Server-sent events; its place is left when it is over, however it ends, also before its first event."""

    def __init__(self, body: AsyncIterator[str], place: StreamPlace) -> None:
        super().__init__(body, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._body, self._place = body, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        body: Any = self._body
        try:
            async with aclosing(body):
                await super().__call__(scope, receive, send)
        finally:
            self._place.leave()


Role = Literal["owner", "annotator"]

INVITED = re.compile(r"[A-Za-z0-9_-]{43}")  # the tokens that are made for people: 256 bits in base64
KNOWN_SECONDS = 10.0  # until a person is looked up again; others may have revoked them elsewhere
MAX_KNOWN = 10_000
LOOKUPS = 4  # threads
MAX_WAITING = 64  # lookups
LOOKUP_SECONDS = 5.0


@dataclass(frozen=True)
class Person:
    """Someone who may enter; `id` is their row among the raters, `queue_id` the only queue they may see."""

    id: int
    name: str
    role: Role
    queue_id: int | None = None


@dataclass(frozen=True)
class Entry:
    """How a person came in: by a session, by their own token, or (neither) by the server's."""

    person: Person
    session: str | None = None
    hashed: str | None = None


class CannotTellError(Exception):
    """It cannot be found out now whose token this is."""


class OtherPersonError(Exception):
    """The token is another person's than whose session the browser has."""


def token_hash(token: str) -> str:
    """What is stored of a token. Tokens are 256 random bits, so that a plain hash cannot be searched."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class _Known:
    person: Person
    checked: float


class Auth:
    """Turns tokens into people and people into sessions. Sessions are in memory: they end with the server."""

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
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- tokens -------------------------------------------------------------------------------------------------

    async def by_token(self, token: str) -> Entry | None:
        """Whose token this is, as a script sends it."""
        if _same(token, self._owner_token):
            return Entry(self._owner)
        hashed = token_hash(token)
        person = await self._rater(hashed) if INVITED.fullmatch(token) else None
        return None if person is None else Entry(person, hashed=hashed)

    async def log_in(
        self, token: str, address: str = "", agent: str = "", *, still: Person | None = None
    ) -> str | None:
        """A new session for the token of a link; None where it is not good, or not any more.

        `still` is who the browser is logged in as and means to stay: a token of anyone else raises OtherPersonError.
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
        """Ask the database, and keep what it says; someone who is not there any more loses their sessions."""
        before = self._revocations
        person = self._find_rater_by_hash(hashed)
        with self._lock:
            self._known.pop(hashed, None)
            if person is not None and self._revocations == before:  # else what was read may be out of date
                self._known[hashed] = _Known(person, time.monotonic())
                while len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        if person is None:
            self.sessions.end_token(hashed)
        return person

    def _check_again(self, hashed: str, known: _Known) -> None:
        """Look a person up again after a while, without waiting for it; while the database is away they stay."""
        if time.monotonic() - known.checked < KNOWN_SECONDS:
            return
        known.checked = time.monotonic()
        with contextlib.suppress(CannotTellError):
            self._look(hashed)  # what it finds is kept by itself, and a failure is tried again

    # -- sessions -----------------------------------------------------------------------------------------------

    def by_session(self, secret: str) -> Entry | None:
        """Whose session this is."""
        found = self.sessions.find(secret)
        if found is None:
            return None
        self._check_token(found)
        return Entry(found.person, session=found.key)

    def holds(self, entry: Entry) -> bool:
        """Whether someone who came in may still be here; a live stream asks now and then."""
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
        """Put a person out whose token was revoked; how many sessions that ended."""
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
