"""`tether sample`: sample answers to prompts and write them as records; an interrupted file is continued."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tether.commands.options import CommandParser, add_model_options, count, load_named, on_this_device
from tether.errors import StorageError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tether.config.sections import PromptSettings
    from tether.evaluation.sample_answers import Sampled
    from tether.models.load import LoadedModel
    from tether.protocols import RewardFn, Sampling
    from tether.types import Prompt

SUMMARY = "Sample several answers to each prompt, as records to annotate or to train on."
EPILOG = """examples:
  tether sample runs/sft prompts.jsonl -n 4 --out answers.jsonl
  tether sample runs/sft prompts.jsonl -n 4 --reward runs/reward --out ranked.jsonl     for tether train reward
  tether sample runs/sft prompts.jsonl -n 4 --reward runs/reward --pairs --out pairs.jsonl    for tether train dpo
  tether sample smollm2-135m prompts.jsonl -n 2 --pairs --reward '{kind: length, max: 40}'
Stop it with Ctrl-C; the same command again continues FILE where it stopped.
"""

MAX_LINE = 1 << 26  # bytes of the last record in a file that is continued


def sample_command(words: list[str]) -> int:
    """Sample and write."""
    parser = CommandParser("sample", SUMMARY, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder, a name or a Hugging Face id")
    parser.add_argument("prompts", metavar="PROMPTS", help="a file with a `prompt` or `messages` in each record")
    parser.add_argument("-n", "--samples", type=count, default=4, metavar="N", help="answers to each prompt (4)")
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="write pairs: with --reward the best answer against the worst, else two answers to be judged",
    )
    parser.add_argument(
        "--reward",
        metavar="PART_OR_FOLDER",
        help="ranks the answers: a reward model's folder, or a part as in a recipe: ended, '{kind: length, max: 40}'",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="a system message (default: the one that the run trained with)"
    )
    parser.add_argument("--out", metavar="FILE", help="a .jsonl file, continued if it exists (default: stdout)")
    parser.add_argument("--limit", type=count, metavar="N", help="only the first N prompts")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability mass of the nucleus (1)")
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="longest answer (128)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same answers (0)")
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object; needs --out")
    return sample_and_write(parser.parse_args(words))


@dataclass
class Totals:
    """Counts of what was written."""

    prompts: int = 0  # those with a record
    records: int = 0
    answers: int = 0
    ended: int = 0
    skipped: int = 0  # prompts that are too long
    without: int = 0  # prompts whose answers gave no record: all empty, equal, or tied


def sample_and_write(options: argparse.Namespace) -> int:
    """Sample the prompts that the file lacks, and print what was written."""
    from tether.data.prompts import read_prompts
    from tether.evaluation.sample_answers import unique_prompts
    from tether.ops.sampling import check_sampling
    from tether.protocols import Sampling
    from tether.store.find import find_run_or_model

    if options.json and not options.out:
        raise UsageError("--json prints a summary on stdout, where the records go: name a file for them with --out")
    if options.samples < 2 and options.pairs:
        raise UsageError("--pairs needs at least two answers to a prompt: raise -n")
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p)
    check_sampling(sampling)
    options.model = find_run_or_model(options.model)
    reading = _reading(options)
    prompts = unique_prompts(read_prompts(options.prompts, reading))[: options.limit]
    origin = _origin(options, sampling, reading)
    target = Path(options.out).expanduser() if options.out else None
    done = _already_done(target, prompts, origin) if target is not None else 0
    totals = Totals()
    if done < len(prompts):
        _sample(options, prompts[done:], sampling, origin, target, totals)
    summary = {"out": str(target) if target else None, "continued_after": done, **dataclasses.asdict(totals)}
    if options.json:
        print(json.dumps(summary))
    else:
        print(_sentence(totals, done, len(prompts), options.out), file=sys.stderr)
    return 0


def _sample(
    options: argparse.Namespace,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    origin: dict[str, Any],
    target: Path | None,
    totals: Totals,
) -> None:
    from rich.console import Console

    from tether.evaluation.sample_answers import sample_answers
    from tether.rollout.native import NativeEngine

    console = Console(stderr=True, quiet=options.json)
    loaded = load_named(options.model, options, console)
    reward = _reward(options.reward, loaded, options.seed) if options.reward else None
    engine = NativeEngine(loaded, max_num_seqs=options.max_num_seqs or "auto")

    def skip(prompt: Prompt, reason: str) -> None:
        del prompt
        totals.skipped += 1
        console.print(f"skipped: {reason}", style="dim", markup=False)

    with _progress(len(prompts), console) as progress, _appending(target) as file:
        for sampled in sample_answers(
            engine, prompts, options.samples, sampling, options.seed, progress, reward=reward, skip=skip
        ):
            records = _records(sampled, options.pairs)
            for record in records:
                file.write(json.dumps(record | {"sampled": origin}, ensure_ascii=False) + "\n")
            file.flush()
            totals.prompts += bool(records)
            totals.without += not records
            totals.records += len(records)
            totals.answers += len(sampled.rollouts)
            totals.ended += sum(rollout.finish == "stop" for rollout in sampled.rollouts)


def _records(sampled: Sampled, pairs: bool) -> list[dict[str, Any]]:
    from tether.evaluation.sample_answers import pair_records, ranking_record

    if pairs:
        return pair_records(sampled)
    record = ranking_record(sampled)
    return [] if record is None else [record]


def _reward(words: str, policy: LoadedModel, seed: int) -> RewardFn:
    from tether.rewards.parts import build_reward
    from tether.rewards.server import reward_parts

    parts = [on_this_device(part) for part in reward_parts(words)]
    return build_reward(parts, own=None, policy=policy, seed=seed)


def _reading(options: argparse.Namespace) -> PromptSettings:
    """How prompts become conversations: with the system message and the template options that the run trained with."""
    from tether.config.sections import PromptSettings
    from tether.store.find import run_config

    data = run_config(options.model).get("data", {})
    known = {name: data[name] for name in ("system_prompt", "chat_template_kwargs") if data.get(name)}
    return PromptSettings.model_validate(known if options.system is None else known | {"system_prompt": options.system})


def _origin(options: argparse.Namespace, sampling: Sampling, reading: PromptSettings) -> dict[str, Any]:
    """The sampling settings. Each record stores them, and all records of a file share them."""
    given = {"model": options.model, "n": options.samples, "seed": options.seed}
    given |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_new_tokens": sampling.max_new_tokens}
    given |= {"system_prompt": reading.system_prompt} if reading.system_prompt else {}
    return given | ({"reward": options.reward} if options.reward else {}) | ({"pairs": True} if options.pairs else {})


def _sentence(totals: Totals, done: int, count: int, out: str | None) -> str:
    if done == count:
        return f"{out} holds the answers to all {count} prompts already; nothing was sampled."
    text = f"{totals.records} records of {totals.prompts} prompts{f' in {out}' if out else ''}"
    text += f", after the {done} prompts that it held" if done else ""
    text += f"; {totals.ended} of {totals.answers} answers ended with an end token"
    text += f"; {totals.skipped} prompts were too long" if totals.skipped else ""
    text += f"; {totals.without} gave no record (answers empty, equal or tied)" if totals.without else ""
    return f"{text}."


# -- a file that is continued -------------------------------------------------------------------------------------


def _already_done(target: Path, prompts: Sequence[Prompt], origin: dict[str, Any]) -> int:
    """The number of prompts already in the file: all up to the prompt of its last complete record.

    An incomplete last line, which a killed process leaves, is cut off. A file with other settings raises a UsageError.
    """
    try:
        if not target.exists():
            return 0
        last = _last_record(target)
    except OSError as error:
        raise StorageError(f"--out: cannot read {target} ({error.strerror})") from error
    if last is None:
        return 0
    before = last.get("sampled")
    if not isinstance(before, dict):
        raise UsageError(f"--out: {target} exists, and was not written by `tether sample`: name another file")
    differ = sorted(key for key in {**before, **origin} if before.get(key) != origin.get(key))
    if differ:
        was = ", ".join(f"{key} was {before.get(key)}" for key in differ)
        raise UsageError(f"--out: {target} was sampled with other settings ({was}): name another file")
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    if last.get("id") not in places:
        raise UsageError(f"--out: {target} holds answers to other prompts than these: name another file")
    return places[last["id"]] + 1


def _last_record(target: Path) -> dict[str, Any] | None:
    """The record on the last line of a file; None if the file has none."""
    with target.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE))
        tail = file.read()
        whole = tail.rfind(b"\n") + 1
        if whole < len(tail):
            if not tail[whole:].lstrip().startswith(b'{"id"'):
                raise UsageError(f"--out: {target} exists, and was not written by `tether sample`: name another file")
            file.truncate(size - len(tail) + whole)
    line = tail[:whole].rstrip(b"\n").rpartition(b"\n")[2]
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UsageError(f"--out: {target} exists, and its last line is not a record: name another file")
    return record


@contextmanager
def _appending(target: Path | None) -> Iterator[TextIO]:
    """The file to append to, or stdout."""
    if target is None:
        yield sys.stdout
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            yield file
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"--out: cannot write {target} ({error.strerror or error})") from error


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere a plain line for each batch."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if console.quiet:
        yield None
        return
    if not console.is_terminal:
        yield lambda done, of: console.print(f"sampled {done} of {of} prompts", markup=False)
        return
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("sampling", total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)
