"""`tether conformance`: check an implementation of PPO against the golden traces."""

from __future__ import annotations

from tether.commands.options import CommandParser


def conformance_command(words: list[str]) -> int:
    """Run the golden traces and print the report."""
    parser = CommandParser("conformance", "Check an implementation of PPO against the golden traces.")
    parser.add_argument("--target", metavar="PACKAGE.MODULE:FACTORY", help="makes the adapter (default: Tether's own)")
    parser.add_argument("--family", nargs="+", action="extend", metavar="NAME", help="only these families of cases")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(words)

    from tether.conformance.runner import main

    return main(options.target, options.json, options.family)
