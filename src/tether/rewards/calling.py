"""Call a user's reward function by its signature, and turn every result or failure into an outcome.

The parameter names of a function say what it takes. Samples are plain data, and the same code runs in the training
process and in worker processes, so this module imports no torch. A sample is a mapping: `prompt`, `completion`,
`answer`, `id`, `messages`, `finish`, `as_messages`, `completion_ids`, `step`, and `columns`, the record's other columns
by name. An exception of the user's code is reported in one line: its type, its text, and the line that raised it.
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
OF_BATCHES = ("prompts", "completions", "completion_ids", "completions_ids")  # parameter names of TRL's shape
COLUMNS_OF_ALL = ("answer", "id", "messages", "finish")  # columns that every record has, beside its own
CHOICES = "text for f(prompt, completion, **columns), trl for f(completions, **columns), rollouts for f(rollouts)"


@dataclass(frozen=True)
class Signature:
    """How a function is called."""

    takes: str  # text, trl or rollouts
    names: tuple[str, ...] = ()  # the parameters
    required: tuple[str, ...] = ()  # those without a default
    everything: bool = False  # has **kwargs
    by_position: int = 0  # text: how many of (prompt, completion, answer) are passed by position
    awaited: bool = False  # is an async function

    def wants(self, name: str) -> bool:
        """Whether this column is passed to it."""
        return self.takes == "rollouts" or self.everything or name in self.names

    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it requires."""
        known = {"text": TEXT_NAMES, "trl": (*TRL_NAMES, *COLUMNS_OF_ALL)}.get(self.takes)
        return tuple(name for name in self.required if name not in known) if known and not self.by_position else ()


def read_signature(function: Any, takes: str, name: str, field: str) -> Signature:
    """How to call `function`, which the recipe's `field` calls `name`; `takes` is the recipe's setting."""
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
        raise ConfigError(f"{field}: the parameters of {shown} do not say what it takes: set takes to {CHOICES}")
    return Signature(
        chosen,
        names,
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        _by_position(parameters, name, field) if chosen == "text" else 0,
        awaited,
    )


def _told(names: tuple[str, ...]) -> str | None:
    """The shape that the parameter names imply; None where they imply none or several."""
    signs = {"rollouts": ("rollouts",), "trl": OF_BATCHES, "text": ("completion",)}
    said = [takes for takes, marks in signs.items() if any(mark in names for mark in marks)]
    return said[0] if len(said) == 1 else None


def _by_position(parameters: list[inspect.Parameter], name: str, field: str) -> int:
    """The number of positional arguments: none where one of the first three parameters has a known name.

    `f(question, reply, gold)` with `takes: text` is called with prompt, completion and answer in this order. A function
    with a parameter `completion` is called by name, so that a misspelled column never receives the answer.
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


MAX_TEXT = 300  # characters of an exception's text
TETHER = str(Path(__file__).parents[1])
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def explain(error: BaseException) -> str:
    """One line such as `KeyError: '11' (mine.py, line 9, in score: return table[answer])`."""
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
    except Exception:  # a user's exception class may have any `__str__`
        return ""


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The deepest line of the user's own code; without one, the deepest line of a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((TETHER, "<frozen"))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    return (own or frames or [None])[-1]


def _shown_file(filename: str) -> str:
    """The file name, relative to the working folder where the file is in it."""
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename


AWAITED_AT_ONCE = 32  # concurrent calls of an async function
NOT_APPLICABLE = "not_applicable"
LIMIT = "reward.timeout_seconds"  # the recipe key of the time limit in the training process
MAX_TIMEOUTS = 3  # per step; after that the function is not called for the other answers
Sample = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A function's result for one sample: a number, or the reason why there is none. Plain data."""

    value: float | None
    reason: str = ""  # one word, for metrics
    error: str = ""  # one line, for users
    parts: dict[str, float] = field(default_factory=dict[str, float])
    raised: bool = False  # the function raised an exception

    def as_json(self) -> dict[str, Any]:
        """The form in which a worker sends it."""
        return asdict(self)


class CallError(Exception):
    """A batch function failed as a whole; the message says why."""


class Caller:
    """A function, and how to call it."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        seconds: float | None = None,
        limit: float | None = None,
        what: str = "the reward",
    ) -> None:
        self.function, self.signature = function, signature
        self.seconds = seconds  # limit for one row of an async function, in a worker
        self.limit = limit  # limit for one call, in the training process
        self.what = what

    def outcomes(self, samples: Sequence[Sample], rollouts: Sequence[Any] = ()) -> list[Outcome]:
        """One outcome per sample. Raises CallError where a batch function returns no list of that length.

        Anything that the function prints goes to standard error, because programs may read standard output.
        """
        with redirect_stdout(sys.stderr):
            if self.signature.takes == "text":
                return self._each(samples)
            if self.signature.takes == "trl":
                return self._batch(samples)
            values = self._call_batch((list(rollouts),), {}, len(rollouts))
            return outcomes_of(values, "none", {})

    # -- one sample per call ----------------------------------------------------------------------------------------

    def _each(self, samples: Sequence[Sample]) -> list[Outcome]:
        if self.signature.awaited:
            rounds = len(samples) // AWAITED_AT_ONCE + 1
            try:
                with time_limit(self.limit and (rounds + 1) * self.limit, self.what):
                    return run_coroutine(self._all_awaited(samples))
            except TimeLimitError:  # a row that blocks the event loop
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
        """The arguments for one sample; every call gets its own copies."""
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
        """The function's result for each sample; where it raises, a failed outcome for every one."""
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
    """The arguments available to a function of TRL's shape: lists over the samples, and a logger into `metrics`.

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
        "completions_ids": ids,  # the name in older versions of TRL
        "trainer_state": SimpleNamespace(global_step=samples[0]["step"] if samples else 0),
    }
    columns = copy.deepcopy(columns)
    columns["log_metric"] = lambda name, value: metrics.__setitem__(str(name), float(value))
    columns["log_extra"] = lambda column, values: None  # noqa: ARG005 (the run's store already has the answers)
    return columns


def read_values(given: Any, number: int) -> list[Any]:
    """The results of a batch function, one per sample. Raises CallError where there are not `number` of them."""
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(given, "__iter__"):
        raise CallError(f"returned {_shown(given)}: it must return a list with one number for each answer")
    try:
        values = list(islice(given, number + 1))
    except BaseException as error:  # for example a generator that raises, or a 0-dimensional tensor
        if isinstance(error, TimeLimitError) or not is_its_own(error):
            raise
        raise CallError(f"returned {type(given).__name__}, which cannot be read: {explain(error)}") from error
    if len(values) != number:
        count = f"{len(values)} scores" if len(values) < number else _count(given, number)
        raise CallError(f"returned {count} for {number} rollouts: it must return one for each")
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
    """A number or a Score as an outcome; anything else, None included, is a failure."""
    if value is None:
        return Outcome(None, of_none, "" if of_none == NOT_APPLICABLE else "the function returned None")
    try:
        if all(hasattr(value, name) for name in ("value", "parts", "valid")):  # a Score, without importing the class
            return _of_score(value)
        number = _number(value)
    except BaseException as error:
        if isinstance(error, TimeLimitError) or not is_its_own(error):
            raise
        return Outcome(None, "not_a_number", f"the function returned {_shown(value)}, which is not a number")
    return _finite(number, dict(metrics or {}))


def _of_score(score: Any) -> Outcome:
    parts = {str(name): _number(part) for name, part in dict(score.parts).items()}
    error = str(getattr(score, "error", "") or "")
    return _finite(_number(score.value), parts) if score.valid else Outcome(None, "invalid", error, parts)


def _finite(number: float, parts: dict[str, float]) -> Outcome:
    if not math.isfinite(number):
        return Outcome(None, "not_finite", f"the function returned {number}", parts)
    return Outcome(number, parts=parts)


def _number(value: Any) -> float:
    """A number of any kind, bool included; numeric text is not accepted."""
    value = value.item() if callable(getattr(value, "item", None)) else value
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(value)
    return float(value)


def raised(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    return Outcome(None, type(error).__name__, explain(error), raised=True)


def timed_out(seconds: float | None, key: str = "timeout_seconds") -> Outcome:
    """The outcome of a call that exceeded its time limit."""
    return Outcome(None, "timeout", f"the function took more than {key} = {seconds or 0:g}")


def run_coroutine(coroutine: Any) -> Any:
    """The result of a coroutine, even where this thread already runs an event loop."""

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
    text = "" if " at 0x" in text else text  # an address means nothing and differs between runs
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}".strip()
