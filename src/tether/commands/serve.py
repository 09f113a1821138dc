"""The commands that start a server: `tether studio`, `serve`, `serve-reward` and `worker`."""

from __future__ import annotations

from tether.commands.options import CommandParser, add_precision_options, count
from tether.studio.settings import add_proxy_options, add_token_options

STUDIO_EPILOG = """examples:
  tether studio
  tether studio --workspace runs --port 8420
  tether studio --host 0.0.0.0 --token-file ~/.studio-token
  tether studio --public-url https://studio.example.org --trusted-proxies 127.0.0.1
It prints a link that works once. Only this machine can reach the server, unless you set --host.
"""
SERVE_EPILOG = """examples:
  tether serve runs/ppo
  TETHER_SERVE_TOKEN=... tether serve smollm2-135m --port 8000
It prints the base_url and the api_key for an OpenAI client. Only this machine can reach the server, unless you set
--host.
"""

WORKER_EPILOG = """examples:
  tether worker
  tether worker --listen 127.0.0.1:8424 --device cuda:1 --token-file ~/.worker-token
Name its address in a recipe, under rollout.servers, and export TETHER_WORKER_TOKEN where the run is. The run says which
model to load. Only this machine can reach the worker, unless --listen names another address.
"""


def studio_command(words: list[str]) -> int:
    """Serve the Studio until stopped."""
    summary = "Open the web page where you watch runs, judge answers and chat with models."
    parser = CommandParser("studio", summary, STUDIO_EPILOG)
    parser.add_argument("--workspace", metavar="DIR", default="runs", help="the folder of runs (runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8420, metavar="N", help="port (8420); 0 picks a free one")
    add_token_options(parser, "TETHER_STUDIO_TOKEN", "the owner's token")
    add_proxy_options(parser)
    parser.add_argument("--json", action="store_true", help="print the address and the tokens as JSON")
    options = parser.parse_args(words)

    from tether.rewards.consent import consenting
    from tether.server.serve import serve_studio

    with consenting(ask=None):  # the sender of a request is not at this terminal
        return serve_studio(options)


def serve_command(words: list[str]) -> int:
    """Serve a model until stopped."""
    summary = "Serve a model over an OpenAI-compatible HTTP endpoint: chat and completions, streaming."
    parser = CommandParser("serve", summary, SERVE_EPILOG)
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run's name or folder, a model's folder, a name or a Hugging Face id"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8422, metavar="N", help="port (8422); 0 picks a free one")
    add_token_options(parser, "TETHER_SERVE_TOKEN", "the token that clients send")
    add_proxy_options(parser)
    parser.add_argument("--name", metavar="NAME", help="what clients call the model (the run's name)")
    parser.add_argument(
        "--max-tokens", type=count, default=1024, metavar="N", help="of a chat answer whose request states none (1024)"
    )
    parser.add_argument("--max-running", type=count, default=4, metavar="N", help="requests answered at once (4)")
    parser.add_argument(
        "--max-waiting", type=count, default=32, metavar="N", help="requests in line; one more is answered 429 (32)"
    )
    add_precision_options(parser)
    parser.add_argument("--json", action="store_true", help="print the address, the token and the name as JSON")
    options = parser.parse_args(words)

    from tether.server.serve import serve_model

    return serve_model(options)


def serve_reward_command(words: list[str]) -> int:
    """Serve a reward until stopped."""
    parser = CommandParser("serve-reward", "Serve a reward over HTTP, for runs whose recipe has a part of kind remote.")
    parser.add_argument(
        "target",
        metavar="MODEL_OR_PART",
        help="a reward model's folder, or a part as in a recipe: ended, '{kind: json, keys: [name]}'",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8421, metavar="N", help="port (8421); 0 picks a free one")
    parser.add_argument("--json", action="store_true", help="print the address and the token as JSON")
    options = parser.parse_args(words)

    from tether.rewards.server import serve

    return serve(options.target, host=options.host, port=options.port, json_output=options.json)


def worker_command(words: list[str]) -> int:
    """Sample for runs until stopped."""
    parser = CommandParser(
        "worker", "Sample answers for runs whose recipe names this worker in rollout.servers.", WORKER_EPILOG
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:8423", help="address (127.0.0.1:8423); port 0: a free one"
    )
    add_token_options(parser, "TETHER_WORKER_TOKEN", "the token that runs send")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 ... (auto)")
    parser.add_argument("--weights-dir", metavar="DIR", help="a folder that runs may write weights to for this worker")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end once standard input closes, for launchers")
    parser.add_argument("--json", action="store_true", help="print the address and the token as JSON")
    options = parser.parse_args(words)

    from tether.server.sampler_service import serve_worker

    return serve_worker(options)
