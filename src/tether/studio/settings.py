"""What a Studio server is told: where it listens, who may enter, and how much they may ask for."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from dataclasses import dataclass, field

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Rate:
    """A bucket of `burst` requests that fills up by `per_second`."""

    per_second: float
    burst: int


@dataclass(frozen=True)
class StudioSettings:
    """One server. `owner_token` serves scripts; `login_code` opens the page once."""

    host: str = "127.0.0.1"
    port: int = 8420
    owner_token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    login_code: str | None = field(default_factory=lambda: secrets.token_urlsafe(32))
    token_logs_in: bool = False  # an explicit token may be used in the link too, and as often as wanted
    session_rate: Rate = Rate(50.0, 300)
    stranger_rate: Rate = Rate(10.0, 100)  # by address, for whoever shows no valid token
    most_streams: int = 12  # live streams of one person at a time
    poll_seconds: float = 0.25  # how often a stream looks at the database
    heartbeat_seconds: float = 5.0

    @property
    def cookie(self) -> str:
        """The session cookie's name; cookies do not know ports, so that the name has to."""
        return f"tether_studio_{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def allows_host(self, name: str) -> bool:
        """Whether a request may say it is for the host `name`.

        A page of another site can make its own name point here, and would then be served as if it were ours. It cannot
        do that with a number, nor with a name that it does not own.
        """
        if name in LOOPBACK_NAMES or name == self.host.lower():
            return True
        if self.is_private:
            return False
        return _is_number(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
