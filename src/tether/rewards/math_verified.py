"""Answers compared by the package math-verify, which computes with them: `2+2` is 4 there, and `x(x+1)` is `x^2+x`.

The final answer is found as for `math`; math-verify reads it as LaTeX and sympy compares. LaTeX is read by a grammar:
what the model wrote is never evaluated as Python. Some texts take sympy for ever, so this is imported and called in
worker processes.
"""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

from tether.rewards.math_answer import MAX_CHARACTERS, final_answers, without_emphasis

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit of its own here


def compare_by_math_verify(prompt: str, completion: str, answer: str) -> float:  # noqa: ARG001 a reward's parameters
    """1.0 where the completion's final answer is the known one, else 0.0."""
    return float(math_verified(completion, answer))


def math_verified(completion: str, reference: str) -> bool:
    """Whether math-verify finds the completion's final answer equal to the reference."""
    # Only LaTeX is looked for: math-verify hands other expressions to sympy's parse_expr, which evaluates Python.
    latex = [LatexExtractionConfig()]
    known = parse(as_latex(reference), latex, parsing_timeout=0)
    for answer in final_answers(completion):
        if answer is not None:
            found = parse(as_latex(answer), latex, parsing_timeout=0)
            if verify(known, found, timeout_seconds=0):
                return True
    return False


def as_latex(text: str) -> str:
    """The text between dollar signs, as math-verify wants LaTeX marked."""
    text = without_emphasis(text[:MAX_CHARACTERS]).replace("\\$", "").strip(" .,;:*_`\n")
    inner = text.replace("$", " ").replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    return f"${inner.strip()}$"
