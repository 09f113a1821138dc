"""The demo's true rule: what a good answer is. Everything else in the demo only ever sees it through choices.

Four things, each worth a part of 1: the answer is finished, short, on topic, and ends on a warm note.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tether.types import Rollout, Score

WEIGHTS = {"finished": 0.25, "short": 0.2, "friendly": 0.35, "on_topic": 0.2}
FEWEST_WORDS, MOST_WORDS = 5, 30
MOST_EXCLAMATIONS = 2
SHORT_CLOSE = 5  # words: "Good luck with your studies!"


def parts_of(completion: str, *, ended: bool, keywords: Sequence[str]) -> dict[str, float]:
    """Each part of the rule, 0 or 1.

    finished   the model stopped by itself, on a full stop, exclamation or question mark
    short      between 5 and 30 words
    friendly   it closes with an exclamation, as in "Enjoy your meal!", and has no more than two
    on_topic   some word begins with one of the prompt's keywords; a short close such as that one does not count
    """
    text = completion.strip()
    topical = _words(_without_close(text))
    return {
        "finished": float(ended and text.endswith((".", "!", "?"))),
        "short": float(FEWEST_WORDS <= len(_words(text)) <= MOST_WORDS),
        "friendly": float(text.endswith("!") and text.count("!") <= MOST_EXCLAMATIONS),
        "on_topic": float(any(word.startswith(keyword) for word in topical for keyword in keywords)),
    }


def _without_close(text: str) -> str:
    """The text without a last sentence of few words that ends in an exclamation mark."""
    *before, last = re.split(r"(?<=[.!?])\s+", text)
    return " ".join(before) if last.endswith("!") and len(_words(last)) <= SHORT_CLOSE else text


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def rule_score(rollout: Rollout) -> Score:
    """The weighted sum of the parts."""
    keywords = rollout.prompt.meta.get("keywords", ())
    parts = parts_of(rollout.completion, ended=rollout.finish == "stop", keywords=keywords)
    return Score(sum(WEIGHTS[name] * value for name, value in parts.items()), parts)


def rule_reward(rollouts: Sequence[Rollout]) -> list[Score]:
    """The rule as a reward."""
    return [rule_score(rollout) for rollout in rollouts]
