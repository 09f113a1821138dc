"""The command line: a table of commands, each of which imports what it needs when it runs.

Nothing heavy is imported here, so that `tether --help` answers at once. To add a command, write a module in
`commands/` and give it one line in `COMMANDS`. Errors are raised, never printed: `main` turns them into one line and an
exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, NoReturn

from tether import __version__
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

METHODS = {
    "sft": "supervised fine-tuning on demonstrations",
    "reward": "a reward model from pairs or rankings",
    "ppo": "Proximal Policy Optimization: clipped, unclipped or with a KL penalty",
    "reinforce": "the plain policy gradient, with any of four weightings",
    "rloo": "REINFORCE with a leave-one-out baseline",
    "grpo": "group-relative advantages, no critic",
    "trpo": "a hard trust region",
    "dpo": "preferences without a reward model",
}

TRAIN_HELP = """Usage: tether train METHOD [RECIPE.yaml] [--section.key VALUE ...] [--json]

Train a model. A flag sets one key of the recipe: --ppo.clip_range 0.1. Flags win over the file, the file over defaults.

Methods:
{methods}

Options:
  --json         print one JSON line a step, in place of the table
  --resume auto  go on with the run of this name if there is one
  --nproc N      train with N processes on this machine; see docs/distributed.md
  --allow-code   PACKAGE or FILE.py whose code the recipe may name; see docs/security.md
  --help         with a method: every key, its default and what it means

Try: tether train ppo recipes/tiny-ppo.yaml
"""

TOP_HELP = """Usage: tether COMMAND ...

Train language models with PPO: every formula tested against an independent oracle.

Commands:
{commands}

Options:
  --version          print the version
  --allow-code NAME  after any command: a package or file whose code a recipe may name; repeatable
  --help             this text; after a command, that command's

Exit codes: 0 done, 1 a bug, 2 wrong usage or recipe, 3 stopped and resumable, 4 diverged, 5 data or reward, 6 storage,
7 stalled, 8 a rank was lost.
TETHER_DEBUG=1 shows where an error was raised.
"""

ALLOW = "--allow-code"
NPROC = "--nproc"
TRAINING = ("train", "resume", "fork")  # commands that several processes can run together
RESERVE = 1 << 24  # bytes that are let go where memory has run out, to have some for saying so


class Command(NamedTuple):
    """What `tether COMMAND` does."""

    summary: str
    run: Callable[[list[str]], int]


# -- commands --------------------------------------------------------------------------------------------------------


def _train(words: list[str]) -> int:
    json_output = "--json" in words
    words = [word for word in words if word != "--json"]
    wants_help = any(word in ("--help", "-h") for word in words)
    words = [word for word in words if word not in ("--help", "-h")]
    if not words and wants_help:
        print(TRAIN_HELP.format(methods=_columns(METHODS)), end="")
        return 0
    if not words or words[0].startswith("-"):
        raise UsageError(f"train needs a method first: tether train METHOD [RECIPE.yaml], one of {', '.join(METHODS)}")
    method, *rest = words
    if method not in METHODS:
        raise UsageError(f"unknown method {method}: {_suggestion(method, METHODS)}")
    if wants_help:
        from tether.config.schema import print_fields

        print_fields(method, METHODS[method])
        return 0
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    resume = _take_resume(rest)

    from tether.config.load import load_recipe

    recipe = load_recipe(method, path, rest)  # before torch is imported: a wrong key is told at once
    from tether.rewards.agree import agree_to_recipe

    agree_to_recipe(recipe, path, rest)
    if resume:
        from tether.train.resume import start_or_resume

        return start_or_resume(recipe, json_output=json_output)

    from tether.train.run import run_recipe

    return run_recipe(recipe, json_output=json_output)


def _take_resume(words: list[str]) -> bool:
    """Whether `--resume auto` is among the words, which it is taken out of."""
    for place, word in enumerate(words):
        if word.startswith("--resume="):
            words[place : place + 1] = word.split("=", 1)
    if "--resume" not in words:
        return False
    place = words.index("--resume")
    value = words[place + 1] if place + 1 < len(words) else "nothing"
    if value not in ("auto", "never"):
        raise UsageError(f"--resume: expected auto or never, was given {value}")
    del words[place : place + 2]
    return value == "auto"


def _take_count(words: list[str]) -> int | None:
    """The value of `--nproc`, which is taken out of the words; None where there is none."""
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == NPROC), None)
    if place is None:
        return None
    _, equals, value = words.pop(place).partition("=")
    if not equals:
        value = words.pop(place) if place < len(words) else "nothing"
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{NPROC}: expected a number of processes, 1 or more, was given {value}")
    return int(value)


def _conformance(words: list[str]) -> int:
    parser = _Parser("conformance", "Check an implementation of PPO against the golden traces.")
    parser.add_argument("--target", metavar="PACKAGE.MODULE:FACTORY", help="makes the adapter; by default Tether's own")
    parser.add_argument("--family", nargs="+", action="extend", metavar="NAME", help="only these families of cases")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(words)

    from tether.conformance.runner import main as run_conformance

    return run_conformance(options.target, options.json, options.family)


def _models(words: list[str]) -> int:
    pulling = words[:1] == ["pull"]
    if pulling:
        parser = _Parser("models pull", "Fetch a model that Tether knows by name into the cache.")
        parser.add_argument("name", metavar="NAME", help="as `tether models` lists it")
        parser.add_argument("--force", action="store_true", help="fetch it anew even if it is there")
    else:
        parser = _Parser("models", "List the models that Tether knows by name; `tether models pull NAME` gets one.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words[pulling:])

    from tether.commands.models import pull_and_show, show_models

    if pulling:
        return pull_and_show(options.name, force=options.force, json_output=options.json)
    return show_models(json_output=options.json)


def _serve_reward(words: list[str]) -> int:
    parser = _Parser("serve-reward", "Serve a reward over HTTP, for runs whose recipe has a part of kind remote.")
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


def _in_module(command: str, module: str, *, takes_flags: bool = False) -> Callable[[list[str]], int]:
    """A command in a light module of its own: `SUMMARY`, `add_options(parser)`, `run(options) -> int`.

    With `takes_flags`, what the parser does not know are keys of a recipe, and left in `options.flags`.
    """

    def run(words: list[str]) -> int:
        its = import_module(module)
        parser = _Parser(command, its.SUMMARY)
        its.add_options(parser)
        options, flags = parser.parse_known_args(words)
        if flags and not takes_flags:
            parser.error(f"unrecognized arguments: {' '.join(flags)}")
        options.flags = flags
        return its.run(options)

    return run


def _demo(words: list[str]) -> int:
    return import_module("tether.commands.demo").main(words)


COMMANDS: dict[str, Command] = {
    "train": Command("train a model: PPO and its neighbours, SFT, a reward model", _train),
    "resume": Command("go on with a run that was stopped or killed", _in_module("resume", "tether.commands.resume")),
    "fork": Command(
        "continue from a checkpoint with other settings",
        _in_module("fork", "tether.commands.fork", takes_flags=True),
    ),
    "replay": Command(
        "recompute a step's advantages under other settings",
        _in_module("replay", "tether.commands.replay", takes_flags=True),
    ),
    "plan": Command(
        "say what a run will cost in memory, steps and seconds",
        _in_module("plan", "tether.commands.plan", takes_flags=True),
    ),
    "data": Command(
        "show what is understood of your data: shape, lengths, examples",
        _in_module("data", "tether.commands.data", takes_flags=True),
    ),
    "conformance": Command("check any implementation of PPO against the golden traces", _conformance),
    "demo": Command("the whole of RLHF on a real model, in minutes", _demo),
    "models": Command("list the models known by name, and fetch one", _models),
    "eval": Command("measure a model, alone or against another", _in_module("eval", "tether.commands.eval")),
    "chat": Command("talk to a model, or to two side by side", _in_module("chat", "tether.commands.chat")),
    "sample": Command(
        "write several answers to each prompt, to annotate or train on",
        _in_module("sample", "tether.commands.sample"),
    ),
    "runs": Command("list the runs of a workspace", _in_module("runs", "tether.commands.runs")),
    "show": Command("show a run, a step, or an answer token by token", _in_module("show", "tether.commands.show")),
    "report": Command("write a run's report", _in_module("report", "tether.commands.report")),
    "export": Command("take a run's model, rollouts or metrics out", _in_module("export", "tether.commands.export")),
    "doctor": Command("say what is wrong with a run, and why", _in_module("doctor", "tether.commands.doctor")),
    "studio": Command("watch runs, judge answers and talk to models", _in_module("studio", "tether.commands.studio")),
    "serve": Command(
        "serve a model to OpenAI clients: chat and completions", _in_module("serve", "tether.commands.serve")
    ),
    "serve-reward": Command("serve a reward model or a rule over HTTP, for other runs", _serve_reward),
}


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
        flush_output()  # here, where a closed pipe or a full disk can still be told
        return code
    except BrokenPipeError:  # `tether --help | head`: the reader left, which is no error
        silence(sys.stdout)
        return 0
    except BaseException as error:  # a reward may raise anything, and exit code 0 is for what was done
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
        raise UsageError(f"unknown {kind} {command}: {_suggestion(command, [*COMMANDS, '--help', '--version'])}")
    if command in TRAINING and (count := _take_count(rest)) is not None:
        from tether.distributed.launch import launch

        return launch([command, *rest], count)
    before = consent.begin(_take_allowed(rest))
    try:
        return _run(command, rest)
    except SystemExit as stop:  # argparse leaves this way after --help; nothing else of ours does
        if stop.code == 0 and ("--help" in rest or "-h" in rest):
            return 0
        if isinstance(stop.__context__, BrokenPipeError):  # rich leaves this way where nobody reads any more
            raise BrokenPipeError from stop
        raise DataError(f"code that the recipe names ended the program with sys.exit({stop.code!r})") from stop
    finally:
        consent.restore(before)


def _run(command: str, words: list[str]) -> int:
    """Run a command in this process, or as one rank of several."""
    if command not in TRAINING or os.environ.get("WORLD_SIZE", "1") == "1":
        return COMMANDS[command].run(words)
    from tether.distributed.launch import started_as_rank

    if not started_as_rank():
        return COMMANDS[command].run(words)
    from tether.distributed.start import run_as_rank

    return run_as_rank(lambda: COMMANDS[command].run(words))


def _report(error: BaseException, *, json_output: bool) -> int:
    """Say what went wrong on stderr, and as the last line of stdout where JSON was asked for."""
    from tether.reports.safe_text import clean  # what a reward or a file says may hold anything

    message, code = judge(error)
    message = clean(redact(message))
    expected = code != TetherError.exit_code or isinstance(error, TetherError)
    try:
        if not expected or os.environ.get("TETHER_DEBUG", "") not in ("", "0"):
            print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        print(f"tether: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # standard error is full or closed; the exit code still tells
        silence(sys.stderr)
    try:
        flush_output()
        if json_output:
            print(json.dumps({"error": message, "exit_code": code}))
            flush_output()
    except (OSError, ValueError, StorageError):  # nobody reads any more
        silence(sys.stdout)
    return code


# -- small parts --------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse that raises a UsageError, and knows no abbreviated options."""

    def __init__(self, command: str, summary: str) -> None:
        super().__init__(prog=f"tether {command}", description=summary, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exit."""
        raise UsageError(f"{message}: see `{self.prog} --help`")


def _take_allowed(words: list[str]) -> list[str]:
    """The values of `--allow-code`, which is taken out of the words: one name each, or several with commas between."""
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
    return TOP_HELP.format(commands=_columns({name: command.summary for name, command in COMMANDS.items()}))


def _columns(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in rows.items())


def _suggestion(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
