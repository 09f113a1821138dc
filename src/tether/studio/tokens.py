"""Where a server's own token comes from: a file or a variable, never the command line, which every user can read."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path
from typing import NoReturn

from tether.errors import ConfigError

SHORTEST_TOKEN = 16
MAX_FILE = 4096  # bytes


def add_token_options(parser: argparse.ArgumentParser, variable: str, whose: str) -> None:
    """--token-file, and an answer to those who write --token."""
    told = f"holds {whose}, of {SHORTEST_TOKEN} characters or more; else {variable}; else a new one is made"
    parser.add_argument("--token-file", metavar="FILE", help=told)
    parser.add_argument("--token", dest="token", default=None, help=argparse.SUPPRESS)


def add_proxy_options(parser: argparse.ArgumentParser) -> None:
    """What a server has to know of the proxy before it."""
    parser.add_argument(
        "--public-url",
        metavar="URL",
        help="as people open it where a proxy stands before it: https://studio.example.org",
    )
    parser.add_argument(
        "--trusted-proxies",
        metavar="ADDRESSES",
        help="whose X-Forwarded-For counts: addresses and networks with commas between (none)",
    )


def chosen_token(options: argparse.Namespace, variable: str) -> str | None:
    """The token that was chosen; None where none was. The variable is taken out of the environment.

    What the server starts, such as a run with someone's reward function, does not get to see it.
    """
    given = os.environ.pop(variable, "").strip()
    if options.token is not None:
        _refuse(variable)
    if options.token_file:
        token, where = _in_file(options.token_file), "--token-file"
    elif given:
        token, where = given, variable
    else:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where}: a token has {SHORTEST_TOKEN} plain characters or more, as `openssl rand -hex 16`")
    return token


def _refuse(variable: str) -> NoReturn:
    raise ConfigError(
        "--token: every user of this machine can read the command line, so that no token is taken from it; write it "
        f"into a file that only you can read and name that with --token-file, or set {variable}"
    )


def _in_file(name: str) -> str:
    """The text of a token file. A file that others can read is told."""
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"--token-file: cannot read {name} (it is no file)")
        with path.open(encoding="utf-8") as file:
            token = file.read(MAX_FILE).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--token-file: cannot read {name} ({reason})") from None
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"tether: --token-file: others can read {name}: chmod 600 {name}", file=sys.stderr)
    return token
