"""`tether studio`: its options, read before anything heavy is imported."""

from __future__ import annotations

import argparse

from tether.studio.settings import add_proxy_options, add_token_options

SUMMARY = "Open the page on which runs are watched, answers are judged, and models are talked to."
EPILOG = """examples:
  tether studio
  tether studio --workspace runs --port 8420
  tether studio --host 0.0.0.0 --token-file ~/.studio-token
  tether studio --public-url https://studio.example.org --trusted-proxies 127.0.0.1
It prints a link that works once. Only this machine can reach it, unless --host says otherwise.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether studio` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--workspace", metavar="DIR", default="runs", help="the folder of runs (runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8420, metavar="N", help="port (8420); 0 picks a free one")
    add_token_options(parser, "TETHER_STUDIO_TOKEN", "the owner's token")
    add_proxy_options(parser)
    parser.add_argument("--json", action="store_true", help="print the address and the tokens as JSON")


def run(options: argparse.Namespace) -> int:
    """Serve until stopped."""
    from tether.rewards.consent import consenting
    from tether.studio.serve import serve

    with consenting(ask=None):  # who sends a request does not sit at this terminal
        return serve(options)
