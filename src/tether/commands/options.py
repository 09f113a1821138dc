"""What several commands share: the parser, options, and loading the models that the options name.

Import nothing heavy here: `tether COMMAND --help` reads this file and the command's own, and must stay instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from tether.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tether.models.load import LoadedModel


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviated options, which raises a UsageError where argparse would exit."""

    def __init__(self, command: str, summary: str, epilog: str | None = None) -> None:
        style = argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter
        super().__init__(
            prog=f"tether {command}", description=summary, epilog=epilog, formatter_class=style, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of exit."""
        raise UsageError(f"{message}: see `{self.prog} --help`")


def count(text: str) -> int:
    """The value of an option that is a whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return number


def columns(rows: dict[str, str]) -> str:
    """Names and their explanations as two columns of a help text."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in rows.items())


def suggestion(word: str, known: Iterable[str]) -> str:
    """The hint for an unknown word: the nearest known one, or all of them."""
    known = list(known)
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"


def add_run_option(parser: argparse.ArgumentParser) -> None:
    """Add RUN, --workspace and --json."""
    parser.add_argument("run", metavar="RUN", help="a run's name as `tether runs` lists it, or its folder")
    add_workspace_options(parser)


def add_workspace_options(parser: argparse.ArgumentParser) -> None:
    """Add --workspace and --json."""
    parser.add_argument(
        "--workspace", metavar="DIR", help="the folder of runs (default: runs, or the folder that RUN is in)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_reading_options(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the options that say how records are read."""
    parser.add_argument(
        "--columns",
        action="append",
        metavar="FIELD=COLUMN",
        help="which column holds which field, such as prompt=question",
    )
    parser.add_argument("--split", metavar="NAME", help="split of a dataset (train)")
    parser.add_argument("--config", metavar="NAME", help="configuration of a dataset that is named by its id")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is loaded and sampled from."""
    group = parser.add_argument_group("how models are loaded")
    add_precision_options(group)
    group.add_argument(
        "--max-num-seqs", type=count, metavar="N", help="answers decoded at once (64; on a GPU what fits)"
    )


def add_precision_options(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add --dtype and --device."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="precision; auto is bfloat16 on a CUDA device that supports it, else float32",
    )
    parser.add_argument("--device", default="auto", help="auto picks CUDA, then MPS, then CPU")


def check_models(*names: str | None) -> None:
    """Raise if a named model does not exist. Call this before torch is imported: a wrong path is reported at once."""
    from tether.store.find import find_model, find_run_or_model

    for name in names:
        if name is not None:
            find_model(find_run_or_model(name))


def load_named(name: str, options: argparse.Namespace, console: Console) -> LoadedModel:
    """Load the model that the command line names, with --dtype, --device and --seed."""
    from tether.models.load import load_causal_lm
    from tether.progress import working
    from tether.seeds import derive_seed
    from tether.store.find import find_model

    seed = derive_seed(options.seed, "model")  # of tiny-bytes: the model that a run with this seed starts from
    path = find_model(name)
    with working(f"loading {name}", quiet=console.quiet):
        return load_causal_lm(path, dtype=options.dtype, device=options.device, seed=seed)


def on_this_device(part: Any) -> Any:
    """A part of a run's reward with a dtype that this machine supports, whatever device the run was on.

    A reward model in bfloat16 stays in bfloat16 where the device supports it, and is loaded in float32 elsewhere.
    """
    from tether.config.rewards import ModelPart
    from tether.models.precision import AUTO

    bfloat16 = isinstance(part, ModelPart) and part.dtype == "bfloat16"
    return part.model_copy(update={"dtype": AUTO}) if bfloat16 else part
