"""The demo's true rule: what a good answer is. Everything else in the demo only ever sees it through choices.

Four things, each worth a part of 1: the answer is finished, short, friendly and on topic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tether.types import Rollout, Score

WEIGHTS = {"finished": 0.25, "short": 0.2, "friendly": 0.35, "on_topic": 0.2}
FEWEST_WORDS, MOST_WORDS = 5, 30
FRIENDLY = re.compile(
    r"!|\b(happy to help|glad you asked|great question|good question|of course|sure|enjoy|good luck|have fun"
    r"|hope (this|that) helps|you('ve| have) got this|take care|feel free|no worries|thanks for asking)\b",
    re.IGNORECASE,
)


def parts_of(completion: str, *, ended: bool, keywords: Sequence[str]) -> dict[str, float]:
    """Each part of the rule, 0 or 1.

    finished   the model stopped by itself, on a full stop, exclamation or question mark
    short      between 5 and 30 words
    friendly   an exclamation mark or a phrase that people say to be kind, at most three exclamation marks
    on_topic   some word begins with one of the prompt's keywords
    """
    text = completion.strip()
    words = re.findall(r"[a-z0-9']+", text.lower())
    kind = bool(FRIENDLY.search(text)) and text.count("!") <= 3
    return {
        "finished": float(ended and text.endswith((".", "!", "?"))),
        "short": float(FEWEST_WORDS <= len(words) <= MOST_WORDS),
        "friendly": float(kind),
        "on_topic": float(any(word.startswith(keyword) for word in words for keyword in keywords)),
    }


def rule_score(rollout: Rollout) -> Score:
    """The weighted sum of the parts."""
    keywords = rollout.prompt.meta.get("keywords", ())
    parts = parts_of(rollout.completion, ended=rollout.finish == "stop", keywords=keywords)
    return Score(sum(WEIGHTS[name] * value for name, value in parts.items()), parts)


def rule_reward(rollouts: Sequence[Rollout]) -> list[Score]:
    """The rule as a reward."""
    return [rule_score(rollout) for rollout in rollouts]
