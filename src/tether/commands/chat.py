"""`tether chat`: a conversation with one model, or with two that get the same questions."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tether.commands.options import CommandParser, add_model_options, check_models, count, load_named
from tether.errors import DataError
from tether.seeds import derive_seed

if TYPE_CHECKING:
    from tether.models.load import LoadedModel
    from tether.protocols import Sampling
    from tether.types import Message, Prompt, Rollout

SUMMARY = "Chat with a model in the terminal; with --compare, with two at once, side by side."
NEW = "/new"
EPILOG = """/new starts a new conversation; Ctrl-D or Ctrl-C leaves. Questions may also come from a pipe.
"""


def chat_command(words: list[str]) -> int:
    """Answer questions until the user leaves."""
    parser = CommandParser("chat", SUMMARY, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder, a name or a Hugging Face id")
    parser.add_argument("--compare", metavar="OTHER", help="a second model, which gets the same questions")
    parser.add_argument("--system", metavar="TEXT", help="a system message, before the first question")
    parser.add_argument("--once", metavar="QUESTION", help="ask this one question, print the answer, and leave")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (0.7)")
    parser.add_argument("--max-new-tokens", type=count, default=256, metavar="N", help="longest answer (256)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same answers (0)")
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line for each question")
    options = parser.parse_args(words)
    check_models(options.model, options.compare)
    return converse(options)


class Conversation:
    """The conversation with one model: the turns so far, and the next answer."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        sampling: Sampling,
        *,
        system: str | None,
        seed: int,
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from tether.rollout.native import NativeEngine
        from tether.types import Message

        self.name = name
        self.template_kwargs = dict(template_kwargs or {})
        self.loaded = loaded
        self.sampling = sampling
        self.engine = NativeEngine(loaded)
        self.seed = seed
        self.opening = (Message(role="system", content=system),) if system else ()
        self.turns: list[Message] = []
        self.dropped = 0  # number of oldest turns that no longer fit into the context
        self.notify = notify

    def answer(self, question: str) -> Rollout:
        """Sample an answer to the question, given the earlier turns that still fit into the context."""
        prompt, sampling, dropped = self.fitted(question)
        if dropped > self.dropped:
            self.notify(self._drop_notice(dropped - self.dropped))
        self.dropped = dropped
        seed = derive_seed(self.seed, "chat", len(self.turns))
        [rollout] = self.engine.generate([prompt], sampling, samples_per_prompt=1, seed=seed)
        return rollout

    def _drop_notice(self, turns: int) -> str:
        what = "The oldest question and its answer are" if turns == 1 else f"The oldest {turns} questions are"
        return f"{what} left out from here on: the conversation is longer than the model's context."

    def add_turn(self, question: str, rollout: Rollout) -> None:
        """Add the question and its answer to the conversation."""
        from tether.types import Message

        self.turns.append(Message(role="user", content=question))
        self.turns.append(Message(role="assistant", content=rollout.completion))

    def begin_anew(self) -> None:
        """Drop everything but the system message."""
        self.turns, self.dropped = [], 0

    def fitted(self, question: str) -> tuple[Prompt, Sampling, int]:
        """The prompt with the earlier turns that fit, its sampling, and the number of old turns that do not fit.

        The answer may take `max_new_tokens`, but at most half of a small context, and no more than the question leaves.
        A question longer than the context raises a DataError.
        """
        from tether.data.chat import prompt_token_ids
        from tether.types import Message, Prompt

        context = self.loaded.context_length
        wanted = min(self.sampling.max_new_tokens, max(1, context // 2))
        asked = Message(role="user", content=question)
        turns, last = 0, len(self.turns) // 2
        while True:
            messages = (*self.opening, *self.turns[2 * turns :], asked)
            prompt = Prompt("chat", messages, template_kwargs=self.template_kwargs)
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


def converse(options: argparse.Namespace) -> int:
    """Answer questions until they end. Leaving by Ctrl-C or Ctrl-D is not an error."""
    from rich.console import Console

    from tether.protocols import Sampling
    from tether.store.find import find_run_or_model, run_config

    console = Console(stderr=True, quiet=options.json)
    sampling = Sampling(options.max_new_tokens, options.temperature)
    conversations: list[Conversation] = []
    printed: list[str] = []

    def notify_user(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    for name in (options.model, options.compare):
        if name is not None:
            name = find_run_or_model(name)
            loaded = load_named(name, options, console)
            for notice in loaded.notices:
                if notice not in printed:
                    printed.append(notice)
                    notify_user(notice)
            notify = (lambda text, name=name: notify_user(f"{name}: {text}")) if options.compare else notify_user
            data = run_config(name).get("data", {})  # as in the run's training, unless options override it
            system = data.get("system_prompt") if options.system is None else options.system
            own = {"seed": options.seed, "notify": notify, "template_kwargs": data.get("chat_template_kwargs")}
            conversations.append(Conversation(name, loaded, sampling, system=system, **own))
    once = options.once is not None
    try:
        for question in [options.once] if once else questions():
            if question.strip() == NEW:
                for conversation in conversations:
                    conversation.begin_anew()
            elif question.strip() or once:
                try:
                    with console.status("thinking"):
                        rollouts = [conversation.answer(question) for conversation in conversations]
                    for conversation, rollout in zip(conversations, rollouts, strict=True):
                        conversation.add_turn(question, rollout)
                    print_answers(question, conversations, rollouts, json_output=options.json)
                except DataError as error:  # such as a question that is longer than the context: ask another
                    if once or not sys.stdin.isatty():
                        raise
                    console.print(str(error), style="red", markup=False)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def questions() -> Iterator[str]:
    """The lines that the user types, until Ctrl-D or the end of the pipe."""
    asking = sys.stdin.isatty()
    if asking:
        with contextlib.suppress(ImportError):  # gives `input` line editing and history, where it is installed
            importlib.import_module("readline")
    while True:
        try:
            yield input("you> " if asking else "")
        except EOFError:
            if asking:
                print()
            return


def print_answers(
    question: str, conversations: Sequence[Conversation], rollouts: Sequence[Rollout], *, json_output: bool
) -> None:
    """Print the answers as text, two of them side by side, or all as one JSON line."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from tether.evaluation.measure import visible

    if json_output:
        answers = [_row(conversation, rollout) for conversation, rollout in zip(conversations, rollouts, strict=True)]
        print(json.dumps({"question": question, "answers": answers}), flush=True)
        return
    texts = [Text(visible(rollout.completion.strip()) or "(nothing)") for rollout in rollouts]
    console = Console(highlight=False)
    for text, rollout in zip(texts, rollouts, strict=True):
        if rollout.finish == "length":
            text.append(" ... (cut off)", style="dim")
    if len(conversations) == 1:
        console.print(texts[0])
        return
    table = Table.grid(expand=True)
    for _ in conversations:
        table.add_column(ratio=1)
    table.add_row(
        *(Panel(text, title=Text(conversation.name)) for text, conversation in zip(texts, conversations, strict=True))
    )
    console.print(table)


def _row(conversation: Conversation, rollout: Rollout) -> dict[str, Any]:
    return {
        "model": conversation.name,
        "answer": rollout.completion,
        "finish": rollout.finish,
        "tokens": rollout.response_length,
    }
