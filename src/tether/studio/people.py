"""Who is asking: the owner or an annotator, known by a session's cookie or by a token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Role = Literal["owner", "annotator"]
ROLES: tuple[Role, ...] = ("owner", "annotator")

SESSION_SECONDS = 7 * 24 * 3600.0
MOST_SESSIONS = 2000


@dataclass(frozen=True)
class Person:
    """Someone who may enter; `id` is their row among the raters, `queue_id` the only queue they may see."""

    id: int
    name: str
    role: Role
    queue_id: int | None = None


def token_hash(token: str) -> str:
    """What is stored of a token. Tokens are 256 random bits, so that a plain hash cannot be searched."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class _Session:
    person: Person
    ends: float


class Doorkeeper:
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
        self._raters: dict[str, Person] = {}  # by the hash of their token: a person never changes
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()

    def by_token(self, token: str) -> Person | None:
        """Whose token this is, as a script sends it."""
        return self._owner if _same(token, self._owner_token) else self._rater(token)

    def log_in(self, token: str) -> str | None:
        """A new session for the token of a link; None where it is not good, or not any more."""
        with self._lock:
            if self._login_code is not None and _same(token, self._login_code):
                self._login_code = None
                return self._begin(self._owner)
        if _same(token, self._owner_token):
            return self._begin_locked(self._owner) if self._token_logs_in else None
        person = self._rater(token)
        return None if person is None else self._begin_locked(person)

    def _rater(self, token: str) -> Person | None:
        hashed = token_hash(token)
        if hashed not in self._raters:
            found = self._find_rater_by_hash(hashed)
            if found is None:
                return None
            self._raters[hashed] = found
        return self._raters[hashed]

    def by_session(self, session: str) -> Person | None:
        """Whose session this is."""
        found = self._sessions.get(token_hash(session))
        return found.person if found is not None and found.ends > time.monotonic() else None

    def _begin_locked(self, person: Person) -> str:
        with self._lock:
            return self._begin(person)

    def _begin(self, person: Person) -> str:
        now = time.monotonic()
        if len(self._sessions) >= MOST_SESSIONS:
            kept = sorted(self._sessions.items(), key=lambda item: item[1].ends)[MOST_SESSIONS // 10 :]
            self._sessions = {key: session for key, session in kept if session.ends > now}
        session = secrets.token_urlsafe(32)
        self._sessions[token_hash(session)] = _Session(person, now + SESSION_SECONDS)
        return session


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
