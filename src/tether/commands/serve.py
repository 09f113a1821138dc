"""`tether serve`: its options, read before torch is imported."""

from __future__ import annotations

import argparse

from tether.commands.eval import count
from tether.studio.settings import add_proxy_options, add_token_options

SUMMARY = "Serve a model over an OpenAI-compatible HTTP endpoint: chat and completions, streaming."
EPILOG = """examples:
  tether serve runs/ppo
  TETHER_SERVE_TOKEN=... tether serve smollm2-135m --port 8000
It prints the base_url and the api_key for an OpenAI client. Only this machine can reach it, unless --host says
otherwise.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether serve` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
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
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="precision; auto is bfloat16 on a CUDA device that computes in it, else float32",
    )
    parser.add_argument("--device", default="auto", help="auto picks CUDA, then MPS, then CPU")
    parser.add_argument("--json", action="store_true", help="print the address, the token and the name as JSON")


def run(options: argparse.Namespace) -> int:
    """Serve until stopped."""
    from tether.server.serve import serve

    return serve(options)
