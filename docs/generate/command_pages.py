"""The command-line reference, from the parsers that the commands build: every command with all its options."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator
from unittest import mock

from markdown_text import code, escaped, table

from tether import cli
from tether.commands.train import METHODS

FOLDER = "reference/commands"
SUBCOMMANDS = {"models": ("pull",)}
"""Commands whose first word may name another command."""

HIDDEN = (None, False, argparse.SUPPRESS)
"""Defaults that say nothing."""


class ParserBuilt(BaseException):
    """Ends a command as soon as its parser is complete, before anything runs."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def command_pages() -> dict[str, str]:
    """One page for each command, and one that lists them."""
    pages = {f"{FOLDER}/index.md": index_page()}
    return pages | {f"{FOLDER}/{name}.md": command_page(name) for name in cli.COMMANDS}


def command_nav() -> list[object]:
    """The command line in the navigation."""
    return [f"{FOLDER}/index.md", *({f"tether {name}": f"{FOLDER}/{name}.md"} for name in cli.COMMANDS)]


def index_page() -> str:
    """All commands, and what holds for each of them."""
    rows = [
        [f"[{code(f'tether {name}')}]({name}.md)", escaped(command.summary)] for name, command in cli.COMMANDS.items()
    ]
    return "\n\n".join(
        ["# Command line", table(["command", "what it does"], rows), "## `tether --help`", _text(_help_of(["--help"]))]
    )


def command_page(name: str) -> str:
    """A command and its subcommands."""
    parts = [f"# {code(f'tether {name}')}"]
    parser = parser_of(name, [])
    if parser is None or not parser.description:
        parts.append(_sentence(cli.COMMANDS[name].summary))
    parts += [_text(_help_of([name, "--help"]))] if parser is None else list(parser_parts(parser))
    if name == "train":
        methods = [
            [f"[{code(method)}](../config/methods/{method}.md)", escaped(about)] for method, about in METHODS.items()
        ]
        parts += ["## Methods", table(["method", "what it trains"], methods)]
    for word in SUBCOMMANDS.get(name, ()):
        below = parser_of(name, [word])
        assert below is not None
        parts += [f"## {code(f'tether {name} {word}')}", *parser_parts(below)]
    return "\n\n".join(parts)


def parser_of(name: str, words: list[str]) -> argparse.ArgumentParser | None:
    """The parser that a command builds for these words; None for a command that has its help as a text."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise ParserBuilt(parser)

    patched = mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop)
    with patched, contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.COMMANDS[name].run([*words, "--help"])
        except ParserBuilt as built:
            return built.parser
    return None


def parser_parts(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Usage, description, a table for each group of arguments, and the examples."""
    if parser.description:
        yield escaped(parser.description)
    yield _text(_wide(parser.format_usage))
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        if rows:
            title = {"positional arguments": "Arguments", "options": "Options"}.get(
                group.title or "", group.title or ""
            )
            yield f"**{_sentence(title).removesuffix('.')}**"
            head = ["argument" if title == "Arguments" else "option", "default", "meaning"]
            if not any(default for _, default, _ in rows):
                head, rows = [head[0], head[2]], [[word, about] for word, _, about in rows]
            yield table(head, rows)
    if parser.epilog:
        yield _text(parser.epilog)


def _row(action: argparse.Action) -> list[str]:
    value = action.metavar if isinstance(action.metavar, str) else (action.dest.upper() if action.nargs != 0 else "")
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    words = [f"{option} {value}".strip() for option in action.option_strings] or [value]
    default = action.default
    shown = "" if default in HIDDEN or default == [] else code(str(default))
    about = (action.help or "") % {**vars(action), "prog": "tether"} if action.help else ""
    return [", ".join(code(word) for word in words), shown, escaped(about)]


def _wide(make: Callable[[], str]) -> str:
    """Text of argparse as it is on a terminal of 80 columns, wherever this runs."""
    with mock.patch.dict("os.environ", {"COLUMNS": "82"}):
        return make()


def _help_of(words: list[str]) -> str:
    out = io.StringIO()
    with mock.patch.dict("os.environ", {"COLUMNS": "82"}), contextlib.redirect_stdout(out):
        code_of_exit = cli.main(words)
    assert code_of_exit == 0, f"tether {' '.join(words)} ended with {code_of_exit}"
    return out.getvalue()


def _sentence(text: str) -> str:
    text = escaped(text.strip())
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def _text(text: str) -> str:
    return "```text\n" + text.strip("\n") + "\n```"
