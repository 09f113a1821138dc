"""Open questions, sampled: does the model repeat itself within an answer, or say the same to everyone?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tether.evaluation.metrics import ngrams, repetition_rate, words
from tether.types import Prompt

GRAM = 4  # words
MAX_NEW_TOKENS = 96

QUESTIONS = (
    "What makes a good friend?",
    "Describe a market on a Saturday morning.",
    "How does a bicycle stay upright?",
    "Tell me a short story about a fox.",
    "What should I think about before I buy a house?",
    "Why do leaves change colour in autumn?",
    "Explain to a child what money is.",
    "Write a short letter to a neighbour about a noisy party.",
    "What is the best way to learn a language?",
    "Describe the taste of a lemon.",
    "How do aeroplanes fly?",
    "What would you pack for a week in the mountains?",
    "Tell me about a famous scientist.",
    "How do I look after a house plant?",
    "What happens in a hospital at night?",
    "Give me advice for a job interview.",
    "Describe a thunderstorm.",
    "Why do we have laws?",
    "What can I cook with eggs and potatoes?",
    "Explain how a camera works.",
    "Write the beginning of a detective story.",
    "What is the difference between weather and climate?",
    "How can two people settle a quarrel?",
    "Describe an old train station.",
)


def prompts(count: int) -> list[Prompt]:
    """The first questions as prompts."""
    return [Prompt.from_text(f"open-{number}", text) for number, text in enumerate(QUESTIONS[:count])]


def repetition(answers: Sequence[str]) -> list[float]:
    """For each answer, the fraction of its 4-grams of words that occurred earlier in it."""
    return [repetition_rate(answer, GRAM) for answer in answers]


def sameness(answers: Sequence[str]) -> list[float]:
    """For each answer, the fraction of its 4-grams of words that another answer has as well; 0 for a short answer."""
    own = [ngrams(words(answer), GRAM) for answer in answers]
    answers_with = Counter(gram for grams in own for gram in set(grams))
    return [sum(answers_with[gram] > 1 for gram in grams) / len(grams) if grams else 0.0 for grams in own]
