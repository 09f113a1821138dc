"""The command line: a table of commands, each of which imports what it needs when it runs.

Nothing heavy is imported here, so that `tether --help` answers at once. To add a command, write a function
`NAME_command(words) -> exit code` in a module of `commands/` and give it one line in `COMMANDS`. Commands raise their
errors; `main` turns an error into one line on stderr and an exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from tether import __version__
from tether.commands.options import columns, suggestion
from tether.errors import (
    DataError,
    StorageError,
    TetherError,
    UsageError,
    flush_output,
    judge,
    prepare_streams,
    silence,
)
from tether.processes import leave_working_folder
from tether.redact import redact
from tether.rewards import consent

EXPOSED_WORDS = (
    "tether: the command line holds a password or token, which everyone on this machine can read in the list of "
    "processes: put the address into TETHER_STORE, or the password into PGPASSWORD or ~/.pgpass"
)

TOP_HELP = """Usage: tether COMMAND ...

Train language models with PPO: every formula tested against an independent oracle.

Commands:
{commands}

Options:
  --version          print the version
  --allow-code NAME  after any command: a package or file whose code a recipe may name; repeatable
  --help             this text; after a command, that command's

Exit codes: 0 done, 1 a bug, 2 wrong usage or recipe, 3 stopped and resumable, 4 diverged, 5 data or reward, 6 storage,
7 stalled, 8 a rank or all rollout workers were lost.
TETHER_DEBUG=1 shows where an error was raised.
"""

ALLOW = "--allow-code"
NPROC, RESTARTS, MIN_NPROC, RAY = "--nproc", "--restarts", "--min-nproc", "--ray"
TRAINING = ("train", "resume", "fork")  # commands that several processes can run together
RESERVE = 1 << 24  # bytes that are freed when memory runs out, so that the error can be printed


class Command(NamedTuple):
    """What `tether COMMAND` does."""

    summary: str
    run: Callable[[list[str]], int]


# -- commands --------------------------------------------------------------------------------------------------------


def _take_count(words: list[str], option: str = NPROC, least: int = 1) -> int | None:
    """Remove `--nproc N`, or another option with a number, from the words; returns N, or None without it."""
    what = f"a whole number, {least} or more"
    value = _take_value(words, option, what)
    if value is not None and (not value.isdecimal() or int(value) < least):
        raise UsageError(f"{option}: expected {what}, got {value}")
    return None if value is None else int(value)


def _take_value(words: list[str], option: str, what: str) -> str | None:
    """Remove an option and its value from the words; returns the value, or None without the option."""
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == option), None)
    if place is None:
        return None
    _, equals, value = words.pop(place).partition("=")
    if not equals:
        value = words.pop(place) if place < len(words) else ""
    if not value or value.startswith("-"):
        raise UsageError(f"{option}: expected {what}, got {value or 'nothing'}")
    return value


def _launched(command: str, words: list[str]) -> int | None:
    """The exit code of several processes, where the words ask for them."""
    count, restarts, at_least = _take_count(words), _take_count(words, RESTARTS, 0), _take_count(words, MIN_NPROC)
    address = _take_value(words, RAY, "the address of a Ray cluster, auto or local")
    if count is None:
        if restarts is not None or at_least is not None or address is not None:
            raise UsageError(f"{RESTARTS}, {MIN_NPROC} and {RAY} go with {NPROC} N, which starts N processes")
        return None
    if at_least is not None and restarts is None and address is None:
        raise UsageError(f"{MIN_NPROC} says how many processes a restart needs: add {RESTARTS} M, or leave it out")
    if at_least is not None and at_least > count:
        raise UsageError(f"{NPROC} is {count} and {MIN_NPROC} {at_least}: the first must not be less")
    if command == "train" and address is None:  # machines of a cluster may have other files
        from tether.commands.train import recipe_of

        own = list(words)
        _take_allowed(own)
        if recipe_of(own) is None:
            return COMMANDS[command].run(own)  # --help
    if address is not None:
        from tether.distributed.ray_launch import launch_on_ray

        return launch_on_ray([command, *words], count, restarts or 0, at_least, address=address)
    from tether.distributed.launch import launch

    return launch([command, *words], count, restarts or 0, at_least)


def _in_module(command: str, module: str) -> Callable[[list[str]], int]:
    """The function `COMMAND_command(words)` of tether.commands.MODULE, imported when it is called."""

    def run(words: list[str]) -> int:
        return getattr(import_module(f"tether.commands.{module}"), f"{command.replace('-', '_')}_command")(words)

    return run


def _table(*rows: tuple[str, str, str]) -> dict[str, Command]:
    return {name: Command(summary, _in_module(name, module)) for name, module, summary in rows}


# name, module of tether.commands, summary
COMMANDS = _table(
    ("train", "train", "train a model: PPO and its neighbours, SFT, a reward model"),
    ("resume", "runs", "resume a run that was stopped or killed"),
    ("fork", "runs", "continue from a checkpoint with other settings"),
    ("replay", "runs", "recompute a step's advantages under other settings"),
    ("plan", "plan", "estimate a run's memory, steps and seconds"),
    ("data", "data", "show how your data is read: shape, lengths, examples"),
    ("conformance", "conformance", "check any implementation of PPO against the golden traces"),
    ("demo", "train", "the whole of RLHF on a real model, in minutes"),
    ("pipeline", "pipelines", "SFT, ratings, reward models and RL in one file, for several rounds"),
    ("sweep", "sweep", "run several settings and seeds, and compare them"),
    ("control", "control", "PPO and TRPO on gymnasium's environments"),
    ("models", "models", "list the models known by name, and fetch one"),
    ("eval", "eval", "measure a model, alone or against another"),
    ("chat", "chat", "chat with a model, or with two side by side"),
    ("sample", "sample", "write several answers to each prompt, to annotate or train on"),
    ("runs", "runs", "list the runs of a workspace"),
    ("show", "runs", "show a run, a step, or an answer token by token"),
    ("report", "runs", "write a run's report"),
    ("export", "export", "export a run's model, rollouts or metrics"),
    ("doctor", "doctor", "say what is wrong with a run, and why"),
    ("studio", "serve", "watch runs, judge answers and chat with models"),
    ("serve", "serve", "serve a model to OpenAI clients: chat and completions"),
    ("serve-reward", "serve", "serve a reward model or a rule over HTTP, for other runs"),
    ("worker", "serve", "sample answers for runs elsewhere"),
)


# -- the frame ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; every expected error becomes one line on stderr."""
    prepare_streams()
    reserve: list[bytearray] = []
    words = sys.argv[1:] if argv is None else list(argv)
    if any("://" in word and redact(word) != word for word in words):
        print(EXPOSED_WORDS, file=sys.stderr)
    if argv is None:
        leave_working_folder()
    try:
        reserve.append(bytearray(RESERVE))
        code = _dispatch(words)
        flush_output()  # here, where a closed pipe or a full disk can still be reported
        return code
    except BrokenPipeError:  # `tether --help | head`: the reader left, which is not an error
        silence(sys.stdout)
        return 0
    except BaseException as error:  # a reward may raise anything, and exit code 0 means success
        reserve.clear()
        try:
            return _report(error, json_output="--json" in words)
        except MemoryError:
            os.write(2, b"tether: out of memory\n")
            return StorageError.exit_code


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_top_help(), end="", file=sys.stderr)
        return UsageError.exit_code
    command, *rest = words
    if command in ("--help", "-h"):
        print(_top_help(), end="")
        return 0
    if command == "--version":
        print(f"tether {__version__}")
        return 0
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        raise UsageError(f"unknown {kind} {command}: {suggestion(command, [*COMMANDS, '--help', '--version'])}")
    if command in TRAINING and (code := _launched(command, rest)) is not None:
        return code
    before = consent.begin(_take_allowed(rest))
    try:
        return _run(command, rest)
    except SystemExit as stop:  # argparse exits so after --help; nothing else of ours does
        if stop.code == 0 and ("--help" in rest or "-h" in rest):
            return 0
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits so when the reader has left
            raise BrokenPipeError from stop
        raise DataError(f"code that the recipe names ended the program with sys.exit({stop.code!r})") from stop
    finally:
        consent.restore(before)


def _run(command: str, words: list[str]) -> int:
    """Run a command in this process, or as one rank of several."""
    if command not in TRAINING or "WORLD_SIZE" not in os.environ:
        return COMMANDS[command].run(words)
    from tether.distributed.launch import started_as_rank

    if not started_as_rank():
        return COMMANDS[command].run(words)
    from tether.distributed.start import run_as_rank

    return run_as_rank(lambda: COMMANDS[command].run(words))


def _report(error: BaseException, *, json_output: bool) -> int:
    """Print the error on stderr, and with --json as the last line of stdout too."""
    from tether.reports.safe_text import clean  # texts of rewards and files may hold control characters

    message, code = judge(error)
    message = clean(redact(message))
    expected = code != TetherError.exit_code or isinstance(error, TetherError)
    try:
        if not expected or os.environ.get("TETHER_DEBUG", "") not in ("", "0"):
            print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        print(f"tether: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # standard error is full or closed; the exit code remains
        silence(sys.stderr)
    try:
        flush_output()
        if json_output:
            print(json.dumps({"error": message, "exit_code": code}))
            flush_output()
    except (OSError, ValueError, StorageError):  # the reader has left
        silence(sys.stdout)
    return code


# -- small parts --------------------------------------------------------------------------------------------------


def _take_allowed(words: list[str]) -> list[str]:
    """The values of `--allow-code`: names, or several with commas between. The option is removed from the words."""
    allowed: list[str] = []
    while place := next((at for at, word in enumerate(words, 1) if word.partition("=")[0] == ALLOW), 0):
        _, equals, value = words.pop(place - 1).partition("=")
        if not equals:
            if place > len(words) or words[place - 1].startswith("-"):
                raise UsageError(f"{ALLOW} needs the name of a package, or a file: {ALLOW} my_package")
            value = words.pop(place - 1)
        allowed += [name for name in value.split(",") if name]
    return allowed


def _top_help() -> str:
    return TOP_HELP.format(commands=columns({name: command.summary for name, command in COMMANDS.items()}))
