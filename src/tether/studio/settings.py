"""Settings of a Studio server, and the source of its token.

A token comes from a file or a variable, never from the command line, which every user of the machine can read.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
import stat
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from tether.errors import ConfigError
from tether.rate_limit import Rate

__all__ = ["Network", "Rate", "StudioSettings", "is_loopback", "public_origin", "trusted_networks"]

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
DEFAULT_PORTS = {"http": 80, "https": 443}
SESSION_RATE, STRANGER_RATE = Rate(50.0, 300), Rate(10.0, 100)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class StudioSettings:
    """Settings of one server. `owner_token` is for scripts; `login_code` opens the page once."""

    host: str = "127.0.0.1"
    port: int = 8420
    owner_token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    login_code: str | None = field(default_factory=lambda: secrets.token_urlsafe(32))
    token_logs_in: bool = False  # a token chosen by the user also works in the link, any number of times
    public_url: str | None = None  # the URL that people open, if there is a proxy in front of the server
    trusted_proxies: tuple[Network, ...] = ()  # their X-Forwarded-For and X-Forwarded-Proto are used
    session_rate: Rate = SESSION_RATE
    stranger_rate: Rate = STRANGER_RATE  # by address, for whoever shows no valid token
    max_streams: int = 12  # live streams of one person at a time
    poll_seconds: float = 0.25  # how often a stream looks at the database
    heartbeat_seconds: float = 5.0

    @property
    def cookie(self) -> str:
        """The session cookie's name. It contains the port, because cookies are shared between ports."""
        return f"tether_studio_{self.port}"

    @property
    def secure_cookie(self) -> str:
        """The cookie's name over TLS. Browsers accept this prefix only from the host itself, and only with `Secure`."""
        return f"__Host-{self.cookie}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @cached_property
    def public_name(self) -> str | None:
        """The host name of `public_url`."""
        return (urlsplit(self.public_url).hostname or "").lower() if self.public_url else None

    @cached_property
    def own_names(self) -> frozenset[str]:
        """This machine's own names, looked up once: a name server can take seconds to answer."""
        return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})

    def allows_host(self, name: str) -> bool:
        """Whether the Host header of a request may be `name`.

        A page of another site can make its own name resolve to this server, and could then read our pages (DNS
        rebinding). It cannot do that with an IP address, or with a name that it does not own.
        """
        if name in LOOPBACK_NAMES or name == self.host.lower() or (name and name == self.public_name):
            return True
        if self.is_private:
            return False
        return _is_number(name) or name in self.own_names

    def trusts(self, address: str) -> bool:
        """Whether a connection comes from a trusted proxy."""
        if not self.trusted_proxies:
            return False
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None) or found
        return any(mapped in network for network in self.trusted_proxies)


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def public_origin(url: str) -> str:
    """`--public-url` as an origin: scheme, host and port, as browsers send it."""
    wrong = ConfigError(f"--public-url: {url!r} is not the address of a site; write https://studio.example.org")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in DEFAULT_PORTS or not host or parts.username is not None or parts.query or parts.fragment:
        raise wrong
    if parts.path.strip("/"):
        raise ConfigError(f"--public-url: {url!r} has a path; Studio needs a host name of its own, without one")
    host = host.lower()
    name = f"[{host}]" if ":" in host else host
    shown = "" if port in (None, DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{name}{shown}"


def trusted_networks(words: str | None) -> tuple[Network, ...]:
    """`--trusted-proxies`: addresses and networks, separated by commas."""
    found: list[Network] = []
    for word in filter(None, (part.strip() for part in (words or "").split(","))):
        try:
            found.append(ipaddress.ip_network(word, strict=False))
        except ValueError:
            raise ConfigError(
                f"--trusted-proxies: {word!r} is not an address or network; write 127.0.0.1 or 10.0.0.0/8"
            ) from None
    return tuple(found)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# -- options of the command line ----------------------------------------------------------------------------------

SHORTEST_TOKEN = 16
MAX_FILE = 4096  # bytes


def add_token_options(parser: argparse.ArgumentParser, variable: str, whose: str) -> None:
    """Add --token-file, and an error message for --token."""
    help_text = f"holds {whose}, of {SHORTEST_TOKEN} characters or more; else {variable}; else a new one is made"
    parser.add_argument("--token-file", metavar="FILE", help=help_text)
    parser.add_argument("--token", dest="token", default=None, help=argparse.SUPPRESS)


def add_proxy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a proxy in front of the server."""
    parser.add_argument(
        "--public-url",
        metavar="URL",
        help="the URL that people open, if there is a proxy in front: https://studio.example.org",
    )
    parser.add_argument(
        "--trusted-proxies",
        metavar="ADDRESSES",
        help="proxies whose X-Forwarded-For is used: addresses and networks, separated by commas (none)",
    )


def chosen_token(options: argparse.Namespace, variable: str) -> str | None:
    """The token that the user chose; None if there is none. The variable is removed from the environment.

    So processes that the server starts, such as a run with a user's reward function, cannot read it.
    """
    given = os.environ.pop(variable, "").strip()
    if options.token is not None:
        _reject(variable)
    if options.token_file:
        token, where = _in_file(options.token_file), "--token-file"
    elif given:
        token, where = given, variable
    else:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where}: a token has {SHORTEST_TOKEN} plain characters or more, as `openssl rand -hex 16`")
    return token


def _reject(variable: str) -> NoReturn:
    raise ConfigError(
        "--token: every user of this machine can read the command line, so a token cannot be given there; write it "
        f"into a file that only you can read and name that with --token-file, or set {variable}"
    )


def _in_file(name: str) -> str:
    """The text of a token file. Prints a warning if others can read the file."""
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"--token-file: cannot read {name} (it is not a file)")
        with path.open(encoding="utf-8") as file:
            token = file.read(MAX_FILE).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--token-file: cannot read {name} ({reason})") from None
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"tether: --token-file: others can read {name}: chmod 600 {name}", file=sys.stderr)
    return token
