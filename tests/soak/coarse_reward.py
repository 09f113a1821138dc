"""1 for an answer with a letter in it, else 0: about half of the groups of two have equal scores."""

from __future__ import annotations


def reward(completion: str) -> float:
    """Whether there is a letter."""
    return float(any(character.isascii() and character.isalpha() for character in completion))
