"""Remove passwords, tokens and keys from everything that is stored or shown.

`redact_url` is for an address that is stored: the password is removed, and you supply it again with PGPASSWORD or
~/.pgpass. `redact` is for any text that people read: errors, events, logs. `secret_in` finds settings that must not be
saved in a recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, unquote_plus

HIDDEN = "***"
SHORTEST = 8  # minimum length of a secret that is searched for: shorter ones occur in ordinary words

SECRET_NAMES = frozenset(
    (
        *("password", "passwd", "pwd", "pgpassword", "sslpassword", "passfile"),
        *("secret", "client_secret", "api_key", "apikey", "api_token", "access_token", "auth_token", "authorization"),
        *("x_amz_signature", "x_amz_credential", "x_amz_security_token", "sig", "signature"),
    )
)
"""Names of settings and URL parameters whose values are secrets, in lower case with underscores."""
_IN_QUERY = SECRET_NAMES | {"token", "key", "auth"}

# Parsed as SQLAlchemy does: the user ends at the first colon, the password at the next @.
_PASSWORD = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://[^:/]*):[^@]*@")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_NAMED = re.compile(
    r"(?i)\b((?:ssl|pg)?passw(?:or)?d|passfile|api[_-]?key|(?:access|auth|api)[_-]?token|client[_-]?secret)"
    r"(=|[\"']\s*[:=]\s*(?=[\"']))(\"[^\"]*\"|'[^']*'|[^\s,;&'\"()]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{16,}")
_TOKEN = re.compile(r"\b(hf_|sk-|gh[pousr]_|wandb_v\d_)[A-Za-z0-9_-]{20,}")
_VARIABLE = re.compile(r"(?i)(token|api_?key|password|passwd|secret)$")

_known: set[str] = set()


def remember_secret(value: str | None) -> None:
    """Make `redact` hide this value from now on, in every quoting."""
    if value and len(value) >= SHORTEST:
        _known.update({value, unquote(value), quote(value, safe="")})


def remember_url(url: str) -> None:
    """Make `redact` hide the secrets of a database URL from now on."""
    password = re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://[^:/]*:([^@]*)@", url)
    remember_secret(password[1] if password else None)
    for name, value in _parameters(url):
        if _is_secret(name, _IN_QUERY):
            remember_secret(unquote_plus(value))


def redact_url(url: str) -> str:
    """A URL without its password, before the host or among the parameters, in every quoting."""
    url = _PASSWORD.sub(r"\1@", url)
    place, mark, query = url.partition("?")
    if not mark:
        return url
    kept = [part for part in query.split("&") if not _is_secret(part.partition("=")[0], _IN_QUERY)]
    return f"{place}?{'&'.join(kept)}" if kept else place


def redact(text: str) -> str:
    """A text with passwords in URLs, secret settings, and known tokens and keys hidden."""
    text = _URL.sub(lambda found: redact_url(found[0]), text)
    text = _NAMED.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _TOKEN.sub(HIDDEN, text)
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def secret_in(settings: Mapping[str, Any]) -> str | None:
    """The dotted key of the first setting whose name or value is a secret; None if there is none."""
    for key, value in _leaves(settings, ""):
        name = key.rpartition(".")[2]
        if isinstance(value, str) and value and (_is_secret(name, SECRET_NAMES) or _TOKEN.search(value)):
            return key
    return None


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{place}]")
    else:
        yield key, value


def _parameters(url: str) -> Iterator[tuple[str, str]]:
    for part in url.partition("?")[2].split("&"):
        name, _, value = part.partition("=")
        yield name, value


def _is_secret(name: str, names: frozenset[str]) -> bool:
    return unquote_plus(name).strip().lower().replace("-", "_") in names


def _secrets() -> set[str]:
    """Remembered secrets, and environment variables whose names mark them as secrets."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= SHORTEST}
    return values | _known
