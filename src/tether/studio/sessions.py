"""The sessions of a server: so many for each person, so that no one can push another out."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.studio.people import Person

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
