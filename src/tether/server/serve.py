"""Starting `tether serve`: read the token, load the model, listen, and serve until stopped."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from pathlib import Path

from tether.errors import ConfigError, UsageError
from tether.store.find import find_model
from tether.store.folder import is_run
from tether.studio.serve import listen, proxy_settings, serve_until_stopped
from tether.studio.settings import StudioSettings, chosen_token, is_loopback

TOKEN_VARIABLE = "TETHER_SERVE_TOKEN"  # noqa: S105 (the variable's name, not a secret)
EXPOSED = """{host} can be reached from outside, and HTTP is not encrypted: put a server with TLS in front of it, or use
an SSH tunnel."""


def serve(options: argparse.Namespace) -> int:
    """Listen, load, say where, and serve."""
    try:
        import uvicorn

        from tether.server.app import create_app
        from tether.server.generate import ServedModel, Turnstile
    except ImportError as error:
        raise UsageError(f"serve needs the package {error.name}: pip install 'tether-rl[serve]'") from None
    from tether.models.load import load_causal_lm
    from tether.studio.connections import freeze_gc, http_options, write_sparingly

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
        announce(served.name, settings, None if chosen else token, json_output=options.json)
        config = uvicorn.Config(app, lifespan="off", **http_options())
        write_sparingly()
        serve_until_stopped(uvicorn.Server(config), listening)
    finally:
        listening.close()
    return 0


def find_token(options: argparse.Namespace) -> tuple[str, bool]:
    """(the token, whether the user chose it). Listening to other machines needs one that was chosen."""
    token = chosen_token(options, TOKEN_VARIABLE)
    if token is not None:
        return token, True
    if not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines in, which needs a token of yours: set {TOKEN_VARIABLE}, or "
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


def announce(name: str, settings: StudioSettings, token: str | None, *, json_output: bool) -> None:
    """Where to connect, and with what; a token that the user chose is not shown."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{settings.public_url or f'http://{host}:{settings.port}'}/v1"
    if json_output:
        print(json.dumps({"url": url, "token": token, "token_env": TOKEN_VARIABLE, "model": name}), flush=True)
    else:
        shown = repr(token) if token else f"what {TOKEN_VARIABLE} or --token-file holds"
        print(f"Serving {name} at {url}. Ctrl-C ends it.\n", flush=True)
        print(f"  base_url  {url!r}\n  api_key   {shown}\n  model     {name!r}\n", flush=True)
    if not settings.is_private:
        print(f"tether: {EXPOSED.format(host=settings.host)}", file=sys.stderr)
