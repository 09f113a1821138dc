"""Start the server: check where it may listen, print its address, and serve until it is stopped."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, StorageError, UsageError
from tether.store.database.open import workspace_at
from tether.studio.connections import freeze_gc
from tether.studio.settings import StudioSettings, chosen_token, is_loopback, public_origin, trusted_networks

if TYPE_CHECKING:
    from uvicorn import Server

TOKEN_VARIABLE = "TETHER_STUDIO_TOKEN"  # noqa: S105 (the variable's name, not a secret)
BACKLOG = 2048  # connections that may wait to be taken, as many as uvicorn lets
SWITCH_SECONDS = 0.001  # so often a thread at long work, as on a long run's curves, lets others in; usually 5 ms

EXPOSED = """Anyone who can reach {address} and has the token can do everything that you can do here: read every run of
{place}, start and stop training, run code that a recipe names, and use its models. The traffic is not encrypted: put a
proxy with TLS in front of it, or use an SSH tunnel."""

NO_PROXY = """--public-url without --trusted-proxies: all clients have the proxy's address, so one client that guesses
tokens slows down the others; name the proxy: --trusted-proxies 127.0.0.1"""


def serve(options: argparse.Namespace) -> int:
    """Listen, print the address, and serve."""
    try:
        import uvicorn

        from tether.studio.app import create_app
        from tether.studio.connections import http_options, write_sparingly
    except ImportError as error:
        raise UsageError(f"studio needs the package {error.name}: pip install 'tether-rl[studio]'") from None
    listening = listen(options.host, options.port)
    settings = settings_for(options, listening.getsockname()[1])
    workspace = workspace_at(options.workspace)
    if workspace.file is not None and not workspace.directory.is_dir():
        print(f"--workspace: {workspace.directory} did not exist, so an empty one was created.", file=sys.stderr)
    app = create_app(workspace, settings)
    freeze_gc()
    sys.setswitchinterval(SWITCH_SECONDS)
    announce(settings, str(workspace.directory), json_output=options.json)
    config = uvicorn.Config(app, lifespan="on", **http_options())
    write_sparingly()
    serve_until_stopped(uvicorn.Server(config), listening)
    return 0


def serve_until_stopped(server: Server, listening: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM, which are a normal end; uvicorn would raise them again after its shutdown."""
    kept = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    startup = server.startup

    async def start(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        listening.listen(BACKLOG)  # asyncio lets no more wait than it accepts at once

    server.startup = start
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def settings_for(options: argparse.Namespace, port: int) -> StudioSettings:
    """The settings from the command line. Listening to other machines requires a token that the user chose."""
    token = chosen_token(options, TOKEN_VARIABLE)
    if token is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines connect and needs your own token: set {TOKEN_VARIABLE}, or "
            "name a --token-file; without --host only this machine can connect"
        )
    given: dict[str, Any] = {"host": options.host, "port": port} | proxy_settings(options)
    return StudioSettings(**given) if token is None else StudioSettings(**given, owner_token=token, token_logs_in=True)


def proxy_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The proxy settings from the command line."""
    url = public_origin(options.public_url) if options.public_url else None
    return {"public_url": url, "trusted_proxies": trusted_networks(options.trusted_proxies)}


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is reported before anything is opened.

    A client that connects as soon as the address is printed waits until the server is up, and is not refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small responses at once (TCP_NODELAY) only if the socket's protocol is TCP; else they wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"--port: cannot listen on {host}:{port} ({reason}); 0 picks a free one") from error
    return listening


def announce(settings: StudioSettings, place: str, *, json_output: bool) -> None:
    """Print the address of the page; its link works once. Browsers do not send the part after # to any server."""
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{settings.port}"
    link = f"{settings.public_url or address}/#token={settings.login_code}"
    if json_output:
        made = None if settings.token_logs_in else settings.owner_token  # one that the user chose is not shown
        summary = {"address": address, "link": link, "token": made, "private": settings.is_private}
        print(json.dumps(summary | {"public_url": settings.public_url, "workspace": place}), flush=True)
        return
    print(f"Tether Studio over {place}: open this link, which works once:\n\n  {link}\n", flush=True)
    if not settings.is_private:
        print(EXPOSED.format(address=address, place=place), file=sys.stderr, flush=True)
    if settings.public_url and not settings.trusted_proxies:
        print(f"tether: {NO_PROXY}", file=sys.stderr, flush=True)
    print("Press Ctrl-C to stop it. Runs that were started from the page continue.", flush=True)
