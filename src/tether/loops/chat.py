"""A conversation with one model, or with two that are asked the same."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.loops.eval_report import visible
from tether.loops.eval_run import load
from tether.models.load import LoadedModel
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.seeds import derive_seed
from tether.types import Message, Prompt, Rollout

NEW = "/new"


class Conversation:
    """One model's side of it: what was said so far, and what it says next."""

    def __init__(self, name: str, loaded: LoadedModel, sampling: Sampling, *, system: str | None, seed: int) -> None:
        self.name = name
        self.loaded = loaded
        self.sampling = sampling
        self.engine = NativeEngine(loaded)
        self.seed = seed
        self.opening = (Message(role="system", content=system),) if system else ()
        self.turns: list[Message] = []

    def answer(self, question: str) -> Rollout:
        """What the model says to the question, after all that was said before."""
        prompt = self.prompt(question)
        seed = derive_seed(self.seed, "chat", len(self.turns))
        [rollout] = self.engine.generate([prompt], self.sampling, samples_per_prompt=1, seed=seed)
        return rollout

    def keep(self, question: str, rollout: Rollout) -> None:
        """Make the question and its answer part of the conversation."""
        self.turns.append(Message(role="user", content=question))
        self.turns.append(Message(role="assistant", content=rollout.completion))

    def begin_anew(self) -> None:
        """Forget everything but the system message."""
        self.turns = []

    def prompt(self, question: str) -> Prompt:
        """The question with all before it, but for the oldest turns that the model's context has no room for."""
        room = self.loaded.context_length - self.sampling.max_new_tokens
        asked = Message(role="user", content=question)
        for forgotten in range(0, len(self.turns), 2):
            prompt = Prompt("chat", (*self.opening, *self.turns[forgotten:], asked))
            if len(prompt_token_ids(self.loaded.tokenizer, prompt)) <= room:
                return prompt
        return Prompt("chat", (*self.opening, asked))


def chat(options: argparse.Namespace) -> int:
    """Ask and answer until the questions end; leaving by Ctrl-C or Ctrl-D is no error."""
    console = Console(stderr=True, quiet=options.json)
    sampling = Sampling(options.max_new_tokens, options.temperature)
    talks: list[Conversation] = []
    for name in (options.model, options.compare):
        if name is not None:
            loaded = load(name, options, console)
            talks.append(Conversation(name, loaded, sampling, system=options.system, seed=options.seed))
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
