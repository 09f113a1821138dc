"""Calling a user's reward function by its signature over samples of plain data.

What a reward function takes, told by the names of its parameters. Free of torch: worker processes import it.

An exception of a user's code in one line: its type, its text, and the line of the user's file that raised it.

Calling a user's function over samples of plain data, with everything that can go wrong turned into an outcome.

The same code runs in the training process and in worker processes, so it imports no torch. A sample is a mapping:
`prompt`, `completion`, `answer`, `id`, `messages`, `finish`, `as_messages`, `completion_ids`, `step`, and `columns`,
the record's other columns by name.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tether.errors import ConfigError
from tether.user_code import TimeLimitError, is_its_own, time_limit

TEXT_NAMES = ("prompt", "completion", "answer", "id", "messages", "finish")
TRL_NAMES = ("prompts", "completions", "completion_ids", "completions_ids", "trainer_state", "log_metric", "log_extra")
OF_BATCHES = ("prompts", "completions", "completion_ids", "completions_ids")  # the names that tell TRL's shape
COLUMNS_OF_ALL = ("answer", "id", "messages", "finish")  # of every record, beside its own columns
CHOICES = "text for f(prompt, completion, **columns), trl for f(completions, **columns), rollouts for f(rollouts)"


@dataclass(frozen=True)
class Signature:
    """How a function is called."""

    takes: str  # text, trl or rollouts
    names: tuple[str, ...] = ()  # of its parameters
    required: tuple[str, ...] = ()  # those without a default
    everything: bool = False  # it has **kwargs
    by_position: int = 0  # text: how many of (prompt, completion, answer) are given by position
    awaited: bool = False  # it is an async function

    def wants(self, name: str) -> bool:
        """Whether it is called with this column."""
        return self.takes == "rollouts" or self.everything or name in self.names

    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it cannot be called without."""
        known = {"text": TEXT_NAMES, "trl": (*TRL_NAMES, *COLUMNS_OF_ALL)}.get(self.takes)
        return tuple(name for name in self.required if name not in known) if known and not self.by_position else ()


def read_signature(function: Any, takes: str, name: str, field: str) -> Signature:
    """How `function`, which the recipe's `field` calls `name`, is called; `takes` is what the recipe says of it."""
    if inspect.isclass(function) or not callable(function):
        what = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"{field}: {name} is {what}: name a function, or an object that can be called")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        if takes == "auto":
            raise ConfigError(f"{field}: the parameters of {name} cannot be read: set takes to {CHOICES}") from None
        return Signature(takes, everything=takes == "trl", by_position=3 if takes == "text" else 0)
    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(p.name for p in named)
    chosen = _told(names) if takes == "auto" else takes
    if chosen is None:
        shown = f"{name}({', '.join(str(p).partition(':')[0] for p in parameters)})"
        raise ConfigError(f"{field}: the parameters of {shown} do not tell what it takes: set takes to {CHOICES}")
    return Signature(
        chosen,
        names,
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        _by_position(parameters, name, field) if chosen == "text" else 0,
        awaited,
    )


def _told(names: tuple[str, ...]) -> str | None:
    """What the names say; None where they say nothing, or several things."""
    signs = {"rollouts": ("rollouts",), "trl": OF_BATCHES, "text": ("completion",)}
    said = [takes for takes, marks in signs.items() if any(mark in names for mark in marks)]
    return said[0] if len(said) == 1 else None


def _by_position(parameters: list[inspect.Parameter], name: str, field: str) -> int:
    """How many arguments a function gets by position: none where any of its first three has a name that is known.

    `f(question, reply, gold)` with `takes: text` is called with prompt, completion and answer in this order. A
    function that names `completion` is called by name, so that a misspelt column is never given the answer.
    """
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    only = [p for p in first if p.kind is p.POSITIONAL_ONLY]
    if not only and any(p.name in TEXT_NAMES for p in parameters):
        return 0
    if only and len(only) != len(first):
        raise ConfigError(f"{field}: {name} mixes parameters before and after `/`: give all of them by name")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    return len(first)


MAX_TEXT = 300  # characters of an exception's own text
TETHER = str(Path(__file__).parents[1])
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def explain(error: BaseException) -> str:
    """Such as `KeyError: '11' (mine.py, line 9, in score: return table[answer])`."""
    said = _text(error)
    said = f"{said[:MAX_TEXT]}..." if len(said) > MAX_TEXT else said
    if isinstance(error, SystemExit):
        said = f"the code called sys.exit({said})"
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frame = _frame(error)
    if frame is None:
        return words
    source = (frame.line or "").strip()
    place = f"{_shown_file(frame.filename)}, line {frame.lineno}, in {frame.name}"
    return f"{words} ({place}: {source})" if source else f"{words} ({place})"


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error)[: 2 * MAX_TEXT].split())
    except Exception:  # an exception of the user's own may have any `__str__`
        return ""


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The deepest line of the user's own code; without one, the deepest of a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((TETHER, "<frozen"))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    return (own or frames or [None])[-1]


def _shown_file(filename: str) -> str:
    """Relative to the working folder, where the file is in it."""
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename


AWAITED_AT_ONCE = 32  # rows of an async function that are under way at the same time
NOT_APPLICABLE = "not_applicable"
LIMIT = "reward.timeout_seconds"  # the recipe's key of the limit in the training process
MAX_TIMEOUTS = 3  # of the answers of a step, after which the function is not called for the others
Sample = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a function gave one sample: a number, or the reason why there is none. Plain data."""

    value: float | None
    reason: str = ""  # one word, for the metrics
    error: str = ""  # one line, for people
    parts: dict[str, float] = field(default_factory=dict[str, float])
    raised: bool = False  # the function raised an exception

    def as_json(self) -> dict[str, Any]:
        """As a worker sends it."""
        return asdict(self)


class CallError(Exception):
    """A function of a whole batch that could not be used; the message says why."""


class Caller:
    """A function, and how it is called."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        seconds: float | None = None,
        limit: float | None = None,
        what: str = "the reward",
    ) -> None:
        self.function, self.signature = function, signature
        self.seconds = seconds  # of one row of an async function, in a worker
        self.limit = limit  # seconds of one call, in the training process
        self.what = what

    def outcomes(self, samples: Sequence[Sample], rollouts: Sequence[Any] = ()) -> list[Outcome]:
        """One outcome for each sample. Raises CallError where a function of batches gives no list of that length.

        What the function prints goes to standard error, for standard output may be read by a program.
        """
        with redirect_stdout(sys.stderr):
            if self.signature.takes == "text":
                return self._each(samples)
            if self.signature.takes == "trl":
                return self._batch(samples)
            values = self._call_batch((list(rollouts),), {}, len(rollouts))
            return outcomes_of(values, "none", {})

    # -- one sample a call ------------------------------------------------------------------------------------------

    def _each(self, samples: Sequence[Sample]) -> list[Outcome]:
        if self.signature.awaited:
            rounds = len(samples) // AWAITED_AT_ONCE + 1
            try:
                with time_limit(self.limit and (rounds + 1) * self.limit, self.what):
                    return run_coroutine(self._all_awaited(samples))
            except TimeLimitError:  # a row that does not let others run
                return [timed_out(self.limit, LIMIT)] * len(samples)
        outcomes: list[Outcome] = []
        for sample in samples:
            late = sum(outcome.reason == "timeout" for outcome in outcomes)
            outcomes.append(self._one(sample) if late < MAX_TIMEOUTS else timed_out(self.limit, LIMIT))
        return outcomes

    def _one(self, sample: Sample) -> Outcome:
        arguments = self._arguments(sample)
        if isinstance(arguments, Outcome):
            return arguments
        try:
            with time_limit(self.limit, self.what):
                value = self.function(*arguments[0], **arguments[1])
                return outcome_of(run_coroutine(value) if isinstance(value, Awaitable) else value)
        except BaseException as error:
            if not is_its_own(error):
                raise
            return self._raised(error)

    async def _all_awaited(self, samples: Sequence[Sample]) -> list[Outcome]:
        gate, seconds = asyncio.Semaphore(AWAITED_AT_ONCE), self.seconds or self.limit

        async def one(sample: Sample) -> Outcome:
            arguments = self._arguments(sample)
            if isinstance(arguments, Outcome):
                return arguments
            async with gate:
                limit = asyncio.timeout(seconds)
                try:
                    async with limit:
                        return outcome_of(await self.function(*arguments[0], **arguments[1]))
                except BaseException as error:
                    if isinstance(error, TimeLimitError) or not is_its_own(error):
                        raise
                    return timed_out(seconds, self._key) if limit.expired() else raised(error)

        return list(await asyncio.gather(*map(one, samples)))

    def _arguments(self, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]] | Outcome:
        """What the function is called with for one sample; each call gets copies of its own."""
        signature = self.signature
        given = sample["columns"] | {name: sample[name] for name in ("prompt", "completion", *COLUMNS_OF_ALL)}
        first = tuple(given[name] for name in ("prompt", "completion", "answer")[: signature.by_position])
        if missing := [name for name in signature.columns() if name not in given]:
            return Outcome(None, "missing_column", f"the record has no column {missing[0]!r}")
        taken = signature.names[len(first) :]
        named = given if signature.everything and not first else {n: given[n] for n in taken if n in given}
        return first, copy.deepcopy(named)

    # -- all samples in one call ------------------------------------------------------------------------------------

    def _batch(self, samples: Sequence[Sample]) -> list[Outcome]:
        metrics: dict[str, float] = {}
        given = batch_columns(samples, metrics)
        signature = self.signature
        if missing := [name for name in signature.required if name not in given]:
            raise CallError(f"takes {missing[0]!r}, and the records have no such column")
        chosen = given if signature.everything else {name: given[name] for name in signature.names if name in given}
        if signature.everything and "completions_ids" not in signature.names:
            chosen = {name: value for name, value in chosen.items() if name != "completions_ids"}
        return outcomes_of(self._call_batch((), chosen, len(samples)), NOT_APPLICABLE, metrics)

    def _call_batch(self, arguments: tuple[Any, ...], named: dict[str, Any], number: int) -> list[Any]:
        """What the function gives each sample; where it raises, the outcome of every one."""
        try:
            with time_limit(self.limit, self.what):
                given = self.function(*arguments, **named)
                given = run_coroutine(given) if isinstance(given, Awaitable) else given
                return read_values(given, number)
        except CallError:
            raise
        except BaseException as error:
            if not is_its_own(error):
                raise
            return [self._raised(error)] * number

    def _raised(self, error: BaseException) -> Outcome:
        return timed_out(self.limit, LIMIT) if isinstance(error, TimeLimitError) else raised(error)

    @property
    def _key(self) -> str:
        return "timeout_seconds" if self.seconds else LIMIT


def batch_columns(samples: Sequence[Sample], metrics: dict[str, float]) -> dict[str, Any]:
    """What a function of TRL's shape may be called with: lists over the samples, and what it may log to `metrics`.

    A prompt and its completion are texts, or lists of messages where the record held messages.
    """
    names = dict.fromkeys(name for sample in samples for name in sample["columns"])
    columns: dict[str, Any] = {name: [sample["columns"].get(name) for sample in samples] for name in names}
    columns |= {name: [sample[name] for sample in samples] for name in COLUMNS_OF_ALL}
    ids = [sample["completion_ids"] for sample in samples]
    columns |= {
        "prompts": [sample["messages"] if sample["as_messages"] else sample["prompt"] for sample in samples],
        "completions": [
            [{"role": "assistant", "content": sample["completion"]}] if sample["as_messages"] else sample["completion"]
            for sample in samples
        ],
        "completion_ids": ids,
        "completions_ids": ids,  # what older versions of TRL call them
        "trainer_state": SimpleNamespace(global_step=samples[0]["step"] if samples else 0),
    }
    columns = copy.deepcopy(columns)
    columns["log_metric"] = lambda name, value: metrics.__setitem__(str(name), float(value))
    columns["log_extra"] = lambda column, values: None  # noqa: ARG005 (answers are in the run's store as they are)
    return columns


def read_values(given: Any, number: int) -> list[Any]:
    """What a function of a batch gave, one for each of `number` samples. Raises CallError where that cannot be."""
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(given, "__iter__"):
        raise CallError(f"gave {_shown(given)}: it must give a list with one number for each answer")
    try:
        values = list(islice(given, number + 1))
    except BaseException as error:  # such as a generator that raises, or a tensor without a dimension
        if isinstance(error, TimeLimitError) or not is_its_own(error):
            raise
        raise CallError(f"gave {type(given).__name__}, which cannot be read: {explain(error)}") from error
    if len(values) != number:
        count = f"{len(values)} scores" if len(values) < number else _count(given, number)
        raise CallError(f"gave {count} for {number} rollouts: it must give one for each")
    return values


def _count(given: Any, number: int) -> str:
    try:
        return f"{len(given)} scores"
    except (Exception, SystemExit):  # a generator has no length
        return f"more than {number} scores"


def outcomes_of(values: Sequence[Any], of_none: str, metrics: dict[str, float]) -> list[Outcome]:
    """An outcome for each value."""
    return [value if isinstance(value, Outcome) else outcome_of(value, of_none, metrics) for value in values]


def outcome_of(value: Any, of_none: str = "none", metrics: dict[str, float] | None = None) -> Outcome:
    """A number as an outcome, or a Score; anything else, and None itself, is a failure."""
    if value is None:
        return Outcome(None, of_none, "" if of_none == NOT_APPLICABLE else "the function gave None")
    try:
        if all(hasattr(value, name) for name in ("value", "parts", "valid")):  # a Score, told without importing it
            return _of_score(value)
        number = _number(value)
    except BaseException as error:
        if isinstance(error, TimeLimitError) or not is_its_own(error):
            raise
        return Outcome(None, "not_a_number", f"the function gave {_shown(value)}, which is no number")
    return _finite(number, dict(metrics or {}))


def _of_score(score: Any) -> Outcome:
    parts = {str(name): _number(part) for name, part in dict(score.parts).items()}
    error = str(getattr(score, "error", "") or "")
    return _finite(_number(score.value), parts) if score.valid else Outcome(None, "invalid", error, parts)


def _finite(number: float, parts: dict[str, float]) -> Outcome:
    if not math.isfinite(number):
        return Outcome(None, "not_finite", f"the function gave {number}", parts)
    return Outcome(number, parts=parts)


def _number(value: Any) -> float:
    """A number of any kind, a bool included; text that looks like one is none."""
    value = value.item() if callable(getattr(value, "item", None)) else value
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(value)
    return float(value)


def raised(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    return Outcome(None, type(error).__name__, explain(error), raised=True)


def timed_out(seconds: float | None, key: str = "timeout_seconds") -> Outcome:
    """The outcome of a call that ran past its limit."""
    return Outcome(None, "timeout", f"the function took more than {key} = {seconds or 0:g}")


def run_coroutine(coroutine: Any) -> Any:
    """The result of a coroutine, also where this thread runs an event loop already."""

    async def whole() -> Any:
        return await coroutine

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(whole())
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(whole()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value)[:500].split())
    except BaseException as error:
        if isinstance(error, TimeLimitError) or not is_its_own(error):
            raise
        text = ""
    text = "" if " at 0x" in text else text  # an address says nothing, and differs from run to run
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}".strip()
