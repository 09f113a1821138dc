"""A conversation with one model, or with two that are asked the same."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tether.commands.eval_run import load
from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.evaluation.measure import visible
from tether.models.load import LoadedModel
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.seeds import derive_seed
from tether.store.find import find_run_or_model, run_config
from tether.types import Message, Prompt, Rollout

NEW = "/new"


class Conversation:
    """One model's side of it: what was said so far, and what it says next."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        sampling: Sampling,
        *,
        system: str | None,
        seed: int,
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005 (nobody wants to know)
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.template_kwargs = dict(template_kwargs or {})
        self.loaded = loaded
        self.sampling = sampling
        self.engine = NativeEngine(loaded)
        self.seed = seed
        self.opening = (Message(role="system", content=system),) if system else ()
        self.turns: list[Message] = []
        self.forgotten = 0  # of the oldest turns, how many are not read any more
        self.notify = notify

    def answer(self, question: str) -> Rollout:
        """What the model says to the question, after all that was said before and still fits."""
        prompt, sampling, forgotten = self.fitted(question)
        if forgotten > self.forgotten:
            self.notify(self._forgets(forgotten - self.forgotten))
        self.forgotten = forgotten
        seed = derive_seed(self.seed, "chat", len(self.turns))
        [rollout] = self.engine.generate([prompt], sampling, samples_per_prompt=1, seed=seed)
        return rollout

    def _forgets(self, turns: int) -> str:
        """That the conversation has become longer than the model's context."""
        what = "The oldest question and its answer are" if turns == 1 else f"The oldest {turns} questions are"
        return f"{what} left out from here on: the conversation is longer than the model's context."

    def keep(self, question: str, rollout: Rollout) -> None:
        """Make the question and its answer part of the conversation."""
        self.turns.append(Message(role="user", content=question))
        self.turns.append(Message(role="assistant", content=rollout.completion))

    def begin_anew(self) -> None:
        """Forget everything but the system message."""
        self.turns, self.forgotten = [], 0

    def fitted(self, question: str) -> tuple[Prompt, Sampling, int]:
        """The question with all before it that fits, how long its answer may be, and how many old turns do not fit.

        The answer gets what was asked for, but at most half of a small context; a question that leaves less gets what
        it leaves. A question that is longer than the context is refused.
        """
        context = self.loaded.context_length
        wanted = min(self.sampling.max_new_tokens, max(1, context // 2))
        asked = Message(role="user", content=question)
        turns, last = 0, len(self.turns) // 2
        while True:
            said = (*self.opening, *self.turns[2 * turns :], asked)
            prompt = Prompt("chat", said, template_kwargs=self.template_kwargs)
            left = context - len(prompt_token_ids(self.loaded.tokenizer, prompt))
            if left >= wanted or turns == last:
                break
            turns += 1
        if left < 1:
            system = " and the system message" if self.opening else ""
            raise DataError(
                f"the question{system} takes {context - left} tokens, which exceeds the model's context of {context}: "
                "ask in fewer words"
            )
        return prompt, replace(self.sampling, max_new_tokens=min(wanted, left)), turns


def chat(options: argparse.Namespace) -> int:
    """Ask and answer until the questions end; leaving by Ctrl-C or Ctrl-D is no error."""
    console = Console(stderr=True, quiet=options.json)
    sampling = Sampling(options.max_new_tokens, options.temperature)
    talks: list[Conversation] = []
    told: list[str] = []

    def tell(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    for name in (options.model, options.compare):
        if name is not None:
            name = find_run_or_model(name)
            loaded = load(name, options, console)
            for notice in loaded.notices:
                if notice not in told:
                    told.append(notice)
                    tell(notice)
            notify = (lambda text, name=name: tell(f"{name}: {text}")) if options.compare else tell
            data = run_config(name).get("data", {})  # as the run was trained, unless told otherwise
            system = data.get("system_prompt") if options.system is None else options.system
            own = {"seed": options.seed, "notify": notify, "template_kwargs": data.get("chat_template_kwargs")}
            talks.append(Conversation(name, loaded, sampling, system=system, **own))
    once = options.once is not None
    try:
        for question in [options.once] if once else questions():
            if question.strip() == NEW:
                for talk in talks:
                    talk.begin_anew()
            elif question.strip() or once:
                try:
                    with console.status("thinking"):
                        rollouts = [talk.answer(question) for talk in talks]
                    for talk, rollout in zip(talks, rollouts, strict=True):
                        talk.keep(question, rollout)
                    show(question, talks, rollouts, json_output=options.json)
                except DataError as error:  # such as a question that is longer than the context: ask another
                    if once or not sys.stdin.isatty():
                        raise
                    console.print(str(error), style="red", markup=False)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def questions() -> Iterator[str]:
    """What the person types, line by line, until Ctrl-D or the end of the pipe."""
    asking = sys.stdin.isatty()
    if asking:
        with contextlib.suppress(ImportError):  # gives `input` its line editing and history, where there is one
            importlib.import_module("readline")
    while True:
        try:
            yield input("you> " if asking else "")
        except EOFError:
            if asking:
                print()
            return


def show(question: str, talks: Sequence[Conversation], rollouts: Sequence[Rollout], *, json_output: bool) -> None:
    """The answers: as text, beside each other where there are two, or as one JSON line."""
    if json_output:
        answers = [_row(talk, rollout) for talk, rollout in zip(talks, rollouts, strict=True)]
        print(json.dumps({"question": question, "answers": answers}), flush=True)
        return
    texts = [Text(visible(rollout.completion.strip()) or "(nothing)") for rollout in rollouts]
    console = Console(highlight=False)
    for text, rollout in zip(texts, rollouts, strict=True):
        if rollout.finish == "length":
            text.append(" ... (cut off)", style="dim")
    if len(talks) == 1:
        console.print(texts[0])
        return
    table = Table.grid(expand=True)
    for _ in talks:
        table.add_column(ratio=1)
    table.add_row(*(Panel(text, title=Text(talk.name)) for text, talk in zip(texts, talks, strict=True)))
    console.print(table)


def _row(talk: Conversation, rollout: Rollout) -> dict[str, Any]:
    return {
        "model": talk.name,
        "answer": rollout.completion,
        "finish": rollout.finish,
        "tokens": rollout.response_length,
    }
