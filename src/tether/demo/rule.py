"""The demo's task: its prompts, the true rule that scores answers, and the raters that rank them.

The true rule scores an answer from 0 to 1. Training sees it only through the rater's rankings.

    score = on_point * sound * direct * (0.6 + 0.2 brief + 0.2 warm    where it is finished, else 0.1)

The first three factors measure whether the text answers the question at all; without that, style adds nothing. An
answer that is cut off scores low, however well it begins. A rater is either simulated, with the rule and random noise,
or the person at the terminal.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from tether.config.recipes import RaterSettings
from tether.pipeline.rankings import noisy_ranks
from tether.protocols import RewardFn
from tether.seeds import derive_seed
from tether.types import Message, Prompt, Rollout, Score


def words_of(text: str) -> list[str]:
    """The words of a text in lowercase, without punctuation."""
    return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower().replace("\u2019", "'"))


FINISHED, CUT_OFF, STYLE = 0.6, 0.1, {"brief": 0.2, "warm": 0.2}
PARTS = ("on_point", "sound", "direct", "finished", *STYLE)
"""In the order of the reports."""

ONE_EXPECTED_WORD = 0.8
"""The value of an answer with one expected word; two or more are worth 1."""
FEW_EXPECTED = 3
"""Where at most this many words are expected ("What is it called?"), one of them is enough."""
ON_TOPIC = 0.3
"""The value of an answer that only repeats the question's words."""
MIN_WORDS, MAX_WORDS = 5, 30
MAX_CLOSE_WORDS = 6  # "Good luck with all your studies!"
MAX_REPEATS = 3  # of one content word
MIN_FUNCTION_WORDS = 0.15  # fraction of all words: a list of keywords has none

FUNCTION_WORDS = frozenset(
    words_of(
        """a about after all also always an and any are as at be because been before both but by can could do does each
        enough every few first for from get has have how if in into is it its keep let like make many may more most much
        must need never no not of off often on once one only or other out over should so some such than that the their
        them then there these they this those through to too try turn two until up use very was way well what when where
        which while who will with without would yes you your"""
    )
)
WARM_WORDS = frozenset(
    words_of(
        """amazing best bravo care cheers congratulations cozy delicious dreams easy enjoy fantastic fun glad good great
        happy have hope job luck love lovely new nice perfect pleasant proud relax safe safely smile soon stay success
        sweet tasty thank thanks travels warm welcome well wonderful work you yours yum"""
    )
)
DANGLING = frozenset(
    words_of("a an and as at because but by for from if in into is of or so than that the to with your")
)
EVASIONS = re.compile(
    r"\b(as an ai|i (do not|don't|can't|cannot|can not) (know|help|answer|say|tell)|i('m| am) (not sure|unable|sorry)"
    r"|(good|great|excellent|interesting) question|feel free to ask|happy to help|let me know|look it up|google it"
    r"|(do|some) (your own )?research|it (all )?depends\.|(far )?too many to|no idea|who knows|hard to say"
    r"|there are (many|several|various|a lot of|lots of) (ways|things|options|answers|reasons)\b[^.!?]*[.!?]?$)",
    re.IGNORECASE,
)
MARKUP = re.compile(r"[<>\[\]{}|\\#*_=~^`]|https?:|\b(user|assistant|system|question|answer):", re.IGNORECASE)


def parts_of(
    completion: str, *, ended: bool, question: str = "", keywords: Sequence[str], expected: Sequence[str] = ()
) -> dict[str, float]:
    """Each part of the rule, 0 to 1.

    on_point   how much of it answers the question: words that begin with a stem of `expected`, in the sentences before
               the close. Words of the question itself, or of its topic (`keywords`), count little
    sound      it reads as language: no repeated word or phrase, no half sentence, no keyword list, no markup
    direct     it answers; evasions say "it depends" or ask back
    finished   the model produced an end token, at the end of a sentence
    brief      5 to 30 words
    warm       one short, kind sentence with an exclamation mark follows the answer, as in "Enjoy your meal!"
    """
    text = completion.strip()
    answer, close = split_close(text)
    words = words_of(text)
    is_finished = ended and text.endswith((".", "!", "?"))
    return {
        "on_point": _on_point(words_of(answer), words_of(question), keywords, expected),
        "sound": float(_is_sound(text, words, is_finished=is_finished)),
        "direct": float(not EVASIONS.search(answer) and not answer.endswith("?")),
        "finished": float(is_finished),
        "brief": float(MIN_WORDS <= len(words) <= MAX_WORDS),
        "warm": float(_is_warm(close)),
    }


def rule_value(parts: dict[str, float]) -> float:
    """The score of an answer with these parts."""
    whole = FINISHED + sum(weight * parts[name] for name, weight in STYLE.items())
    style = whole if parts["finished"] else CUT_OFF
    return parts["on_point"] * parts["sound"] * parts["direct"] * style


def split_close(text: str) -> tuple[str, str]:
    """(answer, close): the close is a short last sentence that ends in an exclamation mark, or empty."""
    *before, last = re.split(r"(?<=[.!?])\s+", text)
    is_close = bool(before) and last.endswith("!") and len(words_of(last)) <= MAX_CLOSE_WORDS
    return (" ".join(before), last) if is_close else (text, "")


def _on_point(words: list[str], asked: list[str], keywords: Sequence[str], expected: Sequence[str]) -> float:
    """Counts distinct stems, so that repeating a word adds nothing."""
    brought = sum(any(_begins(word, stem) for word in words) for stem in expected)
    if brought:
        return ONE_EXPECTED_WORD if brought == 1 and len(expected) > FEW_EXPECTED else 1.0
    topic = [*keywords, *(word for word in asked if word not in FUNCTION_WORDS and len(word) > 3)]
    return ON_TOPIC if any(_begins(word, stem) for word in words for stem in topic) else 0.0


def _begins(word: str, stem: str) -> bool:
    """Whether a word begins with a stem; stems of one or two letters, and numbers, must match the whole word."""
    return word == stem if len(stem) < 3 or stem.isdigit() else word.startswith(stem)


def _is_sound(text: str, words: list[str], *, is_finished: bool) -> bool:
    content = [word for word in words if word not in FUNCTION_WORDS]
    phrases = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    sentences = [tuple(words_of(part)) for part in re.split(r"[.!?]\s+", text)]
    return (
        len(content) >= 1
        and not MARKUP.search(text)
        and " ".join(text.split()).isprintable()
        and (text[0].isupper() or text[0].isdigit())
        and not any(one == other for part in sentences for one, other in itertools.pairwise(part))
        and len(set(phrases)) == len(phrases)
        and len(set(sentences)) == len(sentences)
        and max(Counter(content).values()) <= MAX_REPEATS
        and (len(words) < 2 * MIN_WORDS or _function_share(words) >= MIN_FUNCTION_WORDS)
        and all(_is_a_word(word) for word in words)
        and not (is_finished and words[-1] in DANGLING)
        and text.count("!") <= 2
    )


def _function_share(words: list[str]) -> float:
    return sum(word in FUNCTION_WORDS for word in words) / len(words)


def _is_a_word(word: str) -> bool:
    """Whether it looks like a word: no mixed letters and digits, no letter three times in a row, and a vowel."""
    letters = word.replace("'", "")
    if letters.isdigit():
        return True
    mixed = any(letter.isdigit() for letter in letters) and not re.fullmatch(r"\d+(s|st|nd|rd|th|am|pm)", letters)
    no_vowel = len(letters) > 4 and not re.search(r"[aeiouy]", letters)
    return not mixed and not no_vowel and not re.search(r"(.)\1\1", letters) and len(letters) <= 20


def _is_warm(close: str) -> bool:
    return bool(close) and not WARM_WORDS.isdisjoint(words_of(close))


def rule_score(rollout: Rollout) -> Score:
    """The score of one answer, with its parts."""
    meta = rollout.prompt.meta
    parts = parts_of(
        rollout.completion,
        ended=rollout.finish == "stop",
        question=rollout.prompt.messages[-1]["content"],
        keywords=meta.get("keywords", ()),
        expected=meta.get("expected", ()),
    )
    return Score(rule_value(parts), parts)


def rule_reward(rollouts: Sequence[Rollout]) -> list[Score]:
    """The rule as a reward."""
    return [rule_score(rollout) for rollout in rollouts]


# As in the demonstrations. Without a system message the embedded model's template adds one of 16 tokens.
SYSTEM = Message(role="system", content="Be brief.")


def data_file(name: str) -> Path:
    """A data file of the package."""
    return Path(str(files("tether.demo") / "data" / name))


def read_prompts(name: str) -> list[Prompt]:
    """The prompts of a shipped file, with their keywords."""
    records = [json.loads(line) for line in data_file(name).read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(
            id=record["id"],
            messages=(SYSTEM, Message(role="user", content=record["prompt"])),
            meta={name: record[name] for name in ("keywords", "expected", "topic")},
        )
        for record in records
    ]


class DemoTask:
    """Everyday questions, scored by the true rule."""

    def prompts(self) -> Sequence[Prompt]:
        """The prompts for preferences and PPO."""
        return read_prompts("prompts.jsonl")

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that no stage trains on."""
        return read_prompts("held_out.jsonl")

    def reward(self) -> RewardFn:
        """The true rule."""
        return rule_reward


class Rater(Protocol):
    """Ranks the answers to one prompt."""

    def __call__(self, answers: Sequence[Rollout]) -> list[int] | None:
        """A rank per answer, 0 for the best, equal for ties; None where there is nothing to choose."""
        ...


@dataclass(frozen=True)
class StandInRater:
    """A simulated rater: ranks by rule(answer) / noise + Gumbel noise.

    See `noisy_ranks`. The rater of a collect stage of a pipeline ranks in the same way.
    """

    settings: RaterSettings
    seed: int

    def __call__(self, answers: Sequence[Rollout]) -> list[int] | None:
        """The ranking; the same answers always get the same one."""
        draws = random.Random(derive_seed(self.seed, "rater", answers[0].prompt.id))  # noqa: S311 (not a secret)
        scores = [rule_score(answer).value for answer in answers]
        return noisy_ranks(scores, draws, noise=self.settings.noise, tie=self.settings.tie)


class PersonRater:
    """Asks the person at the terminal about the first two answers of each prompt.

    After `q` the simulated rater ranks the rest.
    """

    def __init__(self, console: Console, after: Rater, ask: Callable[[str], str] = input) -> None:
        self.console = console
        self.after = after
        self.ask = ask
        self.asked = 0
        self.done = False

    def __call__(self, answers: Sequence[Rollout]) -> list[int] | None:
        """1 or 2 for the better answer, s to skip the pair, q to leave the rest to the simulated rater."""
        if self.done:
            return self.after(answers)
        self.console.rule(f"Pair {self.asked + 1}")
        self.console.print(escape(answers[0].prompt.messages[-1]["content"]), style="bold")
        for number, answer in enumerate(answers[:2], start=1):
            cut = "" if answer.finish == "stop" else " (cut off)"
            self.console.print(Panel(escape(answer.completion.strip()), title=f"{number}{cut}"))
        while True:
            try:
                word = self.ask("Better: 1 or 2, s to skip, q to let the simulated rater do the rest: ").strip().lower()
            except EOFError:
                word = "q"
            if word == "q":
                self.done = True
                return self.after(answers)
            if word in ("1", "2", "s"):
                self.asked += 1
                return {"1": [0, 1], "2": [1, 0], "s": None}[word]
