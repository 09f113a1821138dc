"""Starting the server: what it may listen on, what it prints, and serving until it is stopped."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from tether.errors import ConfigError, StorageError, UsageError
from tether.runs.store.open import workspace_at
from tether.studio.long_lived import settle
from tether.studio.settings import StudioSettings, is_loopback

if TYPE_CHECKING:
    from uvicorn import Server

SHORTEST_TOKEN = 16
WAITING = 2048  # connections that may wait to be taken, as many as uvicorn lets
SWITCH_SECONDS = 0.001  # so often a thread at long work, as on a long run's curves, lets others in; usually 5 ms

EXPOSED = """Whoever can reach {address} and has the token can do all that you can do here: read every run of {place},
start and stop training, run code that a recipe names, and talk to its models. The traffic is not encrypted: put a
server with TLS before it, or use an SSH tunnel."""


def serve(options: argparse.Namespace) -> int:
    """Listen, say where, and serve."""
    try:
        import uvicorn

        from tether.studio.app import create_app
    except ImportError as error:
        raise UsageError(f"studio needs the package {error.name}: pip install 'tether-rl[studio]'") from None
    listening = listen(options.host, options.port)
    settings = settings_for(options, listening.getsockname()[1])
    workspace = workspace_at(options.workspace)
    if workspace.file is not None and not workspace.directory.is_dir():
        print(f"--workspace: there was no {workspace.directory}, so a new, empty one is made.", file=sys.stderr)
    app = create_app(workspace, settings)
    settle()
    sys.setswitchinterval(SWITCH_SECONDS)
    announce(settings, str(workspace.directory), json_output=options.json)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # addresses hold the one-time token
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=2,  # live streams never end by themselves
    )
    _serve_until_stopped(uvicorn.Server(config), listening)
    return 0


def _serve_until_stopped(server: Server, listening: socket.socket) -> None:
    """Serve. Ctrl-C and SIGTERM are how it ends, and no error; uvicorn would die of them once it had tidied up."""
    kept = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def settings_for(options: argparse.Namespace, port: int) -> StudioSettings:
    """The settings that the command line means. Listening to other machines needs a token that was chosen for it."""
    if options.token is not None and len(options.token) < SHORTEST_TOKEN:
        raise ConfigError(f"--token: needs {SHORTEST_TOKEN} characters or more, such as $(openssl rand -hex 16)")
    if options.token is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines in, which needs an explicit --token; without --host only this "
            "machine can connect"
        )
    if options.token is None:
        return StudioSettings(host=options.host, port=port)
    return StudioSettings(host=options.host, port=port, owner_token=options.token, token_logs_in=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port in use is told before anything is opened.

    Whoever connects as soon as the address is announced waits until the server is up, and is not refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Asyncio sends small answers at once (TCP_NODELAY) only on a socket that says it is TCP; else they wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(WAITING)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"--port: cannot listen on {host}:{port} ({reason}); 0 picks a free one") from error
    return listening


def announce(settings: StudioSettings, place: str, *, json_output: bool) -> None:
    """Where to find the page; the link in it works once."""
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{settings.port}"
    link = f"{address}/?token={settings.login_code}"
    if json_output:
        told = {"address": address, "link": link, "token": settings.owner_token, "private": settings.is_private}
        print(json.dumps(told | {"workspace": place}), flush=True)
        return
    print(f"Tether Studio over {place}: open this link, which works once:\n\n  {link}\n", flush=True)
    if not settings.is_private:
        print(EXPOSED.format(address=address, place=place), file=sys.stderr, flush=True)
    print("Ctrl-C ends it. Runs that were started from the page go on.", flush=True)
