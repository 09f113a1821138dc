"""Instructions that a rule can verify (after IFEval, Zhou et al. 2023): each names a form, and a checker looks for it.

A checker reads the answer alone. It says nothing of whether the answer is true or good.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tether.types import Prompt

Check = Callable[[str], bool]
MAX_NEW_TOKENS = 64

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_BULLET = re.compile(r"^\s*[-*•]\s+\S", re.MULTILINE)
_NUMBERED = re.compile(r"^\s*\d+[.)]\s+\S", re.MULTILINE)
_SENTENCE = re.compile(r"[^.!?]*[^\W_][^.!?]*[.!?]+")
_FENCE = re.compile(r"^```[a-z]*\n(.*?)\n?```$", re.DOTALL)


def word_count(text: str) -> int:
    """Words: runs of letters and digits, with the hyphens and apostrophes inside them."""
    return len(_WORD.findall(text))


def at_most_words(most: int, text: str) -> bool:
    """Between one word and `most`."""
    return 1 <= word_count(text) <= most


def at_least_words(least: int, text: str) -> bool:
    """`least` words or more."""
    return word_count(text) >= least


def has_word(word: str, text: str) -> bool:
    """Whether the word occurs as a whole word, in any case."""
    return word.lower() in (found.lower() for found in _WORD.findall(text))


def is_upper(text: str) -> bool:
    """Whether there are letters, and all are capitals."""
    return text.isupper()


def is_lower(text: str) -> bool:
    """Whether there are letters, and none is a capital."""
    return text.islower()


def has_bullets(count: int, text: str) -> bool:
    """Exactly `count` lines that start with a bullet: -, * or •."""
    return len(_BULLET.findall(text)) == count


def has_numbered(count: int, text: str) -> bool:
    """Exactly `count` lines that start with a number and a dot or a bracket."""
    return len(_NUMBERED.findall(text)) == count


def is_json_with(keys: tuple[str, ...], text: str) -> bool:
    """One JSON object with exactly these keys, alone or in a fenced block."""
    whole = text.strip()
    fenced = _FENCE.match(whole)
    try:
        found = json.loads(fenced[1] if fenced else whole)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and set(found) == set(keys)


def ends_with(ending: str, text: str) -> bool:
    """Whether the last characters, without white space, are these."""
    return text.rstrip().endswith(ending)


def starts_with(beginning: str, text: str) -> bool:
    """Whether the first characters, without white space, are these."""
    return text.lstrip().startswith(beginning)


def is_quoted(text: str) -> bool:
    """Whether the whole answer is within double quotation marks."""
    whole = text.strip()
    return len(whole) > 2 and whole[0] in '"“' and whole[-1] in '"”'


def sentence_count(count: int, text: str) -> bool:
    """Exactly `count` sentences, and nothing after the last one's mark."""
    whole = text.strip()
    return len(_SENTENCE.findall(whole)) == count and whole[-1:] in tuple(".!?")


@dataclass(frozen=True)
class Instruction:
    """A request in words, and its checker."""

    kind: str
    words: str
    check: Check

    def prompt(self, number: int) -> Prompt:
        """The request as a prompt."""
        return Prompt.from_text(f"instruction-{number}", self.words)


def _all() -> list[Instruction]:
    """Four instructions of each kind; the kinds take turns, so that the first N hold as many kinds as they can."""
    kinds: dict[str, list[tuple[str, Check]]] = {
        "at_most_words": [
            (f"{question} Answer with at most {most} words.", partial(at_most_words, most))
            for question, most in (
                ("What is the capital of France?", 3),
                ("What colour is the sky on a clear day?", 5),
                ("What do bees make?", 4),
                ("Why do people sleep?", 10),
            )
        ],
        "has_word": [
            (f"Write one sentence about {topic}. Use the word '{word}'.", partial(has_word, word))
            for topic, word in (("winter", "snow"), ("a farm", "horse"), ("the sea", "waves"), ("cooking", "salt"))
        ],
        "is_upper": [
            (f"{question} Write your whole answer in capital letters.", is_upper)
            for question in (
                "What is the opposite of hot?",
                "Name a fruit.",
                "Which animal says meow?",
                "Say hello to a friend.",
            )
        ],
        "is_lower": [
            (f"{question} Write your whole answer in lowercase letters, with no capitals.", is_lower)
            for question in (
                "Name a vegetable.",
                "What do you wear on your feet?",
                "Describe rain in one sentence.",
                "What is two plus two?",
            )
        ],
        "has_bullets": [
            (f"List {what}. Write exactly {count} lines, and start each with '- '.", partial(has_bullets, count))
            for what, count in (("colours", 3), ("animals", 4), ("things in a kitchen", 3), ("sports", 2))
        ],
        "has_numbered": [
            (f"{what} Give exactly {count} numbered points, as in '1.'.", partial(has_numbered, count))
            for what, count in (
                ("How do you make tea?", 3),
                ("Name some planets.", 4),
                ("How can one save water?", 2),
                ("Name some months.", 5),
            )
        ],
        "is_json_with": [
            (f"Answer with a JSON object alone, with the keys {named}. Describe {what}.", partial(is_json_with, keys))
            for what, keys in (
                ("a dog", ("name", "age")),
                ("a book", ("title", "author")),
                ("a city", ("city", "country")),
                ("a car", ("colour", "doors")),
            )
            for named in (" and ".join(f'"{key}"' for key in keys),)
        ],
        "ends_with": [
            (f"{question} End your answer with the word{'s' if ' ' in end else ''} '{end}'", partial(ends_with, end))
            for question, end in (
                ("Tell me about cats.", "The end."),
                ("What is a river?", "That is all."),
                ("Why is exercise good?", "Take care!"),
                ("What is a computer?", "Done."),
            )
        ],
        "starts_with": [
            (f"{question} Start your answer with '{begin}'.", partial(starts_with, begin))
            for question, begin in (
                ("Is the earth round?", "Yes"),
                ("What is music?", "Music is"),
                ("Can I have a cookie?", "Of course"),
                ("What is your favourite season?", "My favourite"),
            )
        ],
        "is_quoted": [
            (f"{question} Put your whole answer in double quotation marks.", is_quoted)
            for question in ("Name a flower.", "What do cows drink?", "Say good night.", "Name a country in Africa.")
        ],
        "sentence_count": [
            (f"{what} Write exactly {count} sentence{'s' if count > 1 else ''}.", partial(sentence_count, count))
            for what, count in (
                ("Describe a tree.", 1),
                ("What is a school?", 2),
                ("Describe the moon.", 2),
                ("What is bread?", 1),
            )
        ],
        "at_least_words": [
            (f"{what} Write at least {least} words.", partial(at_least_words, least))
            for what, least in (
                ("Describe a day at the beach.", 30),
                ("Tell a story about a lost key.", 40),
                ("Explain how plants grow.", 30),
                ("Describe your home town.", 35),
            )
        ],
    }
    rounds = range(max(map(len, kinds.values())))
    return [Instruction(kind, *each[turn]) for turn in rounds for kind, each in kinds.items()]


INSTRUCTIONS: tuple[Instruction, ...] = tuple(_all())
