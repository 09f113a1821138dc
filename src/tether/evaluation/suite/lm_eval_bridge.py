"""The bridge to lm-evaluation-harness (the extra `lm-eval`): its tasks on a model of Tether's.

No code of a stranger runs. A task is one that the installed package ships, by its name, or a YAML file of the user's
own that holds data only: see `own_task`. Templates run in Jinja's sandbox, and no metric is fetched as code.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, Protocol

import torch

from tether.data.chat import prompt_token_ids
from tether.errors import ConfigError, DataError, TetherError
from tether.evaluation.suite.own_task import is_own_task, read_own_task
from tether.evaluation.suite.suite_model import SuiteModel
from tether.protocols import Sampling
from tether.types import Prompt

MISSING = (
    "lm-eval: the package lm_eval is not installed (the extra `lm-eval` is not installed): "
    "pip install 'tether-rl[lm-eval]'"
)
NAME = re.compile(r"[A-Za-z0-9_.+-]+")
MAX_GEN_TOKENS = 256  # lm-eval's own default
FEWSHOT_SEED = 1234  # lm-eval's own default
SKIPPED = ("word_perplexity", "byte_perplexity")  # bits_per_byte says the same, with a value per item

Found = dict[str, tuple[tuple[float, ...], Literal["higher", "lower"]]]


class Request(Protocol):
    """A request of lm-eval."""

    args: tuple[Any, ...]


def run_tasks(model: SuiteModel, tasks: Sequence[str], *, items: int | None, seed: int) -> Found:
    """For each `lm-eval:TASK/METRIC`, the values of its items and which direction is better."""
    try:
        harness_tasks: Any = import_module("lm_eval.tasks")
        simple_evaluate: Any = import_module("lm_eval.evaluator").simple_evaluate
    except ImportError as error:
        raise ConfigError(MISSING if error.name == "lm_eval" else f"{MISSING} ({error})") from None
    given = [read_own_task(task) if is_own_task(task) else task for task in tasks]
    with _contained(seed):
        shipped = any(isinstance(task, str) for task in given)
        manager = harness_tasks.TaskManager(include_defaults=shipped)
        _check_names(given, manager)
        model.heartbeat("suite: lm-eval reads its data")
        try:
            results: Any = simple_evaluate(
                model=_language_model(model, seed),
                tasks=given,
                limit=items,
                task_manager=manager,
                bootstrap_iters=0,
                fewshot_random_seed=FEWSHOT_SEED,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        except TetherError:
            raise
        except Exception as error:  # a task is a program of many libraries, and may raise anything
            raise DataError(_reason(tasks, error)) from None
    return _columns(results)


def _check_names(given: Sequence[str | dict[str, Any]], manager: Any) -> None:
    known = set(manager.all_tasks)
    for task in given:
        if isinstance(task, str) and (not NAME.fullmatch(task) or task not in known):
            raise ConfigError(
                f"lm-eval:{task} is neither a task of the installed lm_eval nor a .yaml file: `lm-eval ls tasks` lists "
                "the tasks"
            )


def _reason(tasks: Sequence[str], error: Exception) -> str:
    name, text = type(error).__name__, " ".join(str(error).split())[:200]
    words = f"lm-eval:{','.join(tasks)} could not be run ({name}: {text})"
    if isinstance(error, OSError) or "offline" in text.lower() or "couldn't" in text.lower() or "Hub" in name:
        return f"{words}: its data is not on this machine and could not be downloaded"
    return words


def _columns(results: Mapping[str, Any]) -> Found:
    found: Found = {}
    for task, samples in results["samples"].items():
        directions = results.get("higher_is_better", {}).get(task, {})
        first: dict[Any, Mapping[str, Any]] = {}
        for sample in samples:  # one for each filter: the first counts
            first.setdefault(sample["doc_id"], sample)
        rows = [first[doc] for doc in sorted(first)]
        for metric in dict.fromkeys(name for row in rows for name in row["metrics"] if name not in SKIPPED):
            values = [_number(row.get(metric)) for row in rows]
            if values and all(value is not None for value in values):
                better = "higher" if directions.get(metric, True) else "lower"
                found[f"lm-eval:{task}/{metric}"] = tuple(value for value in values if value is not None), better
    if not found:
        raise DataError("lm-eval: the tasks gave no number for each item, so there is nothing to report")
    return found


def _number(value: object) -> float | None:
    """An item's value; of a pair (log-likelihood, bytes), bits per byte."""
    if isinstance(value, tuple | list) and len(value) == 2:
        nats, size = (_number(each) for each in value)
        return None if nats is None or not size else -nats / size / math.log(2.0)
    if not isinstance(value, bool | int | float) and not hasattr(value, "item"):
        return None
    number = float(value)  # pyright: ignore[reportArgumentType]
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def _contained(seed: int) -> Iterator[None]:
    """lm-eval with sandboxed templates, seeded generators that are put back, and no chatter in a file of messages."""
    import numpy
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    harness: Any = import_module("lm_eval.utils")
    whole = harness.env
    sandboxed = ImmutableSandboxedEnvironment(undefined=whole.undefined, keep_trailing_newline=True)
    sandboxed.filters.update(whole.filters)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    level = logging.getLogger("lm_eval").level
    hidden = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    harness.env = sandboxed
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    try:
        with hidden, _no_fetched_metrics():
            yield
    finally:
        harness.env = whole
        logging.getLogger("lm_eval").setLevel(level)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def _no_fetched_metrics() -> Iterator[None]:
    """`evaluate.load` fetches a metric's code from a hub; here a task that asks for one fails instead."""
    evaluate: Any = import_module("evaluate")

    def refused(name: str, *_: object, **__: object) -> None:
        raise ConfigError(f"lm-eval: the metric {name} is code from a hub, which is not run")

    whole = evaluate.load
    evaluate.load = refused
    try:
        yield
    finally:
        evaluate.load = whole


def _language_model(model: SuiteModel, seed: int) -> Any:
    """The model as lm-eval's class; made here because its base class is in the extra."""
    LM: Any = import_module("lm_eval.api.model").LM

    class TetherLM(LM):
        """Answers lm-eval's requests with `SuiteModel`."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return loglikelihoods(model, [request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return rolling_loglikelihoods(model, [request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return generations(model, [request.args for request in requests], seed)

    return TetherLM()


def loglikelihoods(model: SuiteModel, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    """For each (context, continuation): log p(continuation | context), and whether greedy decoding gives it.

    Spaces at the end of a context belong to the continuation, as tokenizers join them to the next word. A row that is
    too long loses the beginning of its context.
    """
    rows: list[list[int]] = []
    firsts: list[int] = []
    for context, continuation in pairs:
        kept = context.rstrip(" ")
        whole = _ids(model, context + continuation)
        scored = max(1, len(whole) - len(_ids(model, kept)))
        row = [*model.opening, *whole][-model.context_length :]
        rows.append(row)
        firsts.append(max(1, len(row) - scored))
    sums = [float(column.sum()) for column in model.logprobs(rows, firsts, "lm-eval")]
    return list(zip(sums, model.are_greedy(rows, firsts, "lm-eval"), strict=True))


def rolling_loglikelihoods(model: SuiteModel, texts: Sequence[str]) -> list[float]:
    """log p of each whole text, each token predicted once, in windows of the whole context where it is longer."""
    rows: list[list[int]] = []
    firsts: list[int] = []
    owners: list[int] = []
    size = model.context_length
    for number, text in enumerate(texts):
        row = [*model.opening, *_ids(model, text)]
        done = len(model.opening)
        while done < len(row):
            end = min(len(row), done + size - 1)
            start = max(0, end - size)
            rows.append(row[start:end])
            firsts.append(max(1, done - start))
            owners.append(number)
            done = end
    sums = [0.0] * len(texts)
    for owner, column in zip(owners, model.logprobs(rows, firsts, "lm-eval"), strict=True):
        sums[owner] += float(column.sum())
    return sums


def generations(model: SuiteModel, requests: Sequence[tuple[str, Mapping[str, Any]]], seed: int) -> list[str]:
    """An answer to each context, cut at the first of its `until` texts.

    A chat model gets the context as a user turn.
    """
    found = [""] * len(requests)
    groups: dict[tuple[int, float], list[int]] = {}
    for number, (_, options) in enumerate(requests):
        length = int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_GEN_TOKENS)))
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        groups.setdefault((min(length, model.context_length // 2), temperature), []).append(number)
    for (length, temperature), numbers in groups.items():
        prompts = [_prompt(model, requests[number][0], number, length) for number in numbers]
        answers = model.answers(prompts, Sampling(length, temperature), seed, "lm-eval")
        for number, answer in zip(numbers, answers, strict=True):
            until = requests[number][1].get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            places = [place for stop in stops if stop and (place := answer.completion.find(stop)) >= 0]
            found[number] = answer.completion[: min(places, default=len(answer.completion))]
    return found


def _prompt(model: SuiteModel, text: str, number: int, length: int) -> Prompt:
    """The context as a prompt that leaves room for the answer; the beginning of one that is too long is cut off."""
    prompt = Prompt.from_text(f"lm-eval-{number}", text or " ")
    over = len(prompt_token_ids(model.tokenizer, prompt)) + length - model.context_length
    if over <= 0:
        return prompt
    kept = model.tokenizer.decode(_ids(model, text)[over + 8 :], skip_special_tokens=False)
    return Prompt.from_text(prompt.id, kept or " ")


def _ids(model: SuiteModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))
