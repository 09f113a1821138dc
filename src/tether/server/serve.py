"""Start a server, `tether studio` or `tether serve`: listen, say where, and serve until it is stopped."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.errors import ConfigError, StorageError, UsageError
from tether.store.database.open import workspace_at
from tether.store.find import find_model
from tether.store.folder import is_run
from tether.studio.settings import StudioSettings, chosen_token, is_loopback, public_origin, trusted_networks

if TYPE_CHECKING:
    from uvicorn import Server

STUDIO_TOKEN = "TETHER_STUDIO_TOKEN"  # noqa: S105 (the variables' names, not secrets)
SERVE_TOKEN = "TETHER_SERVE_TOKEN"  # noqa: S105
BACKLOG = 2048  # connections that may wait to be taken, as many as uvicorn lets
SWITCH_SECONDS = 0.001  # so often a thread at long work, as on a long run's curves, lets others in; usually 5 ms

STUDIO_EXPOSED = """\
Anyone who can reach {address} and has the token can do everything that you can do here: read every run of
{place}, start and stop training, run code that a recipe names, and use its models. The traffic is not encrypted: put a
proxy with TLS in front of it, or use an SSH tunnel."""

NO_PROXY = """--public-url without --trusted-proxies: all clients have the proxy's address, so one client that guesses
tokens slows down the others; name the proxy: --trusted-proxies 127.0.0.1"""

MODEL_EXPOSED = """\
{host} can be reached from outside, and HTTP is not encrypted: put a server with TLS in front of it, or use
an SSH tunnel."""


# -- the studio ----------------------------------------------------------------------------------------------------


def serve_studio(options: argparse.Namespace) -> int:
    """Listen, print the address, and serve."""
    try:
        import uvicorn

        from tether.studio.app import create_app
        from tether.studio.connections import freeze_gc, http_options, write_sparingly
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
    announce_studio(settings, str(workspace.directory), json_output=options.json)
    config = uvicorn.Config(app, lifespan="on", **http_options())
    write_sparingly()
    serve_until_stopped(uvicorn.Server(config), listening)
    return 0


def settings_for(options: argparse.Namespace, port: int) -> StudioSettings:
    """The settings from the command line. Listening to other machines requires a token that the user chose."""
    token = chosen_token(options, STUDIO_TOKEN)
    if token is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines connect and needs your own token: set {STUDIO_TOKEN}, or "
            "name a --token-file; without --host only this machine can connect"
        )
    given: dict[str, Any] = {"host": options.host, "port": port} | proxy_settings(options)
    return StudioSettings(**given) if token is None else StudioSettings(**given, owner_token=token, token_logs_in=True)


def announce_studio(settings: StudioSettings, place: str, *, json_output: bool) -> None:
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
        print(STUDIO_EXPOSED.format(address=address, place=place), file=sys.stderr, flush=True)
    if settings.public_url and not settings.trusted_proxies:
        print(f"tether: {NO_PROXY}", file=sys.stderr, flush=True)
    print("Press Ctrl-C to stop it. Runs that were started from the page continue.", flush=True)


# -- a model -------------------------------------------------------------------------------------------------------


def serve_model(options: argparse.Namespace) -> int:
    """Listen, load, say where, and serve."""
    try:
        import uvicorn

        from tether.server.app import create_app
        from tether.server.generate import ServedModel, Turnstile
        from tether.studio.connections import freeze_gc, http_options, write_sparingly
    except ImportError as error:
        raise UsageError(f"serve needs the package {error.name}: pip install 'tether-rl[serve]'") from None
    from tether.models.load import load_causal_lm

    token, chosen = find_token(options)
    listening = listen(options.host, options.port)  # first: a port in use is reported before a model is loaded
    try:
        path = find_served(options.model)
        loaded = load_causal_lm(path, dtype=options.dtype, device=options.device, seed=0)
        served = ServedModel(served_name(options), loaded, options.max_tokens, aliases=(options.model,))
        port, proxy = listening.getsockname()[1], proxy_settings(options)
        settings = StudioSettings(host=options.host, port=port, owner_token=token, **proxy)
        app = create_app(served, settings, Turnstile(options.max_running, options.max_waiting))
        freeze_gc()
        announce_model(served.name, settings, None if chosen else token, json_output=options.json)
        config = uvicorn.Config(app, lifespan="off", **http_options())
        write_sparingly()
        serve_until_stopped(uvicorn.Server(config), listening)
    finally:
        listening.close()
    return 0


def find_token(options: argparse.Namespace) -> tuple[str, bool]:
    """(the token, whether the user chose it). Listening to other machines needs one that was chosen."""
    token = chosen_token(options, SERVE_TOKEN)
    if token is not None:
        return token, True
    if not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines in, which needs a token of yours: set {SERVE_TOKEN}, or "
            "name a --token-file"
        )
    return secrets.token_urlsafe(32), False


def find_served(name: str) -> str:
    """What to load: a run of the workspace `runs` may be named by its name alone."""
    folder = Path("runs") / name
    if not Path(name).expanduser().exists() and is_run(folder):
        return find_model(str(folder))
    return find_model(name)


def served_name(options: argparse.Namespace) -> str:
    """The name that clients use: --name, else the run's name, else the model's."""
    if options.name:
        return options.name
    folder = Path(options.model).expanduser()
    if not folder.exists():
        return options.model
    folder = folder.resolve()
    return folder.parent.name if folder.name in ("model", "best", "merged") else folder.name


def announce_model(name: str, settings: StudioSettings, token: str | None, *, json_output: bool) -> None:
    """Where to connect, and with what; a token that the user chose is not shown."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{settings.public_url or f'http://{host}:{settings.port}'}/v1"
    if json_output:
        print(json.dumps({"url": url, "token": token, "token_env": SERVE_TOKEN, "model": name}), flush=True)
    else:
        shown = repr(token) if token else f"what {SERVE_TOKEN} or --token-file holds"
        print(f"Serving {name} at {url}. Ctrl-C ends it.\n", flush=True)
        print(f"  base_url  {url!r}\n  api_key   {shown}\n  model     {name!r}\n", flush=True)
    if not settings.is_private:
        print(f"tether: {MODEL_EXPOSED.format(host=settings.host)}", file=sys.stderr)


# -- both ----------------------------------------------------------------------------------------------------------


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
