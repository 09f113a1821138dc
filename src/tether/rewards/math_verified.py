"""Compare mathematical answers with the package math-verify, of the extra `math`.

It simplifies: `2+2` equals 4 there, and `x(x+1)` equals `x^2+x`. It parses the answer as LaTeX with a grammar, and
sympy compares; the model's text is never evaluated as Python. Some texts never finish in sympy, so it runs only in
worker processes. They import this module by the name that `parts.py` gives them.
"""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

from tether.rewards.math_answer import MAX_CHARACTERS, final_answers, without_emphasis

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off


def compare_by_math_verify(prompt: str, completion: str, answer: str) -> float:  # noqa: ARG001 a reward's parameters
    """1.0 where the completion's final answer equals the known one, else 0.0."""
    return float(math_verified(completion, answer))


def math_verified(completion: str, reference: str) -> bool:
    """Whether math-verify finds the completion's final answer equal to the reference."""
    # Only LaTeX is parsed: math-verify passes other expressions to sympy's parse_expr, which evaluates Python.
    latex = [LatexExtractionConfig()]
    known = parse(as_latex(reference), latex, parsing_timeout=0)
    for answer in final_answers(completion):
        if answer is not None:
            found = parse(as_latex(answer), latex, parsing_timeout=0)
            if verify(known, found, timeout_seconds=0):
                return True
    return False


def as_latex(text: str) -> str:
    """The text between dollar signs, which math-verify needs to recognize LaTeX."""
    text = without_emphasis(text[:MAX_CHARACTERS]).replace("\\$", "").strip(" .,;:*_`\n")
    inner = text.replace("$", " ").replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    return f"${inner.strip()}$"
