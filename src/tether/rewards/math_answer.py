"""Extract the final answer of a completion, and decide whether two mathematical answers are equal.

`math_correct` finds the final answer; `same_answer` compares two answers. `math_terms` defines which answers are
compared by value and which as text. No text makes these functions raise, and none is evaluated.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from tether.config.rewards import Extract
from tether.rewards.math_terms import (
    DASHES,
    NUMERAL,
    Group,
    Quantity,
    close,
    known_unit,
    last_numeral,
    number,
    parse_quantity,
    parse_term,
    same_term,
    split_unit,
    without_name,
)

_MARKER = re.compile(r"\banswer\b[\s*_]*(?:is\b|:|=)[\s*_:]*([^\n]*)|^####([^\n]*)", re.IGNORECASE | re.MULTILINE)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def extract(completion: str, how: Extract, reference: str | None = None) -> str | None:
    """The answer in a completion.

    whole: all of it. last_line: the last line that is not blank. marker: the content of the last
    `<answer>...</answer>`, else the rest of the line after the last `answer:`, `answer is` or `####`. last_number: the
    last number. boxed: the content of the last `\\boxed{...}`. auto: boxed, else marker, else the last line; where the
    reference is a number, the last number in the box, in the marker's first sentence, or in the whole text.
    """
    match how:
        case "whole":
            return completion.strip() or None
        case "last_line":
            return last_line(completion)
        case "marker":
            return marked(completion)
        case "last_number":
            return last_numeral(completion)
        case "boxed":
            return boxed(completion)
        case "auto":
            found = boxed(completion) or marked(completion)
            if reference is not None and number(reference) is not None:
                return last_numeral(completion if found is None else first_sentence(found))
            return found or last_line(completion)


def last_line(completion: str) -> str | None:
    """The last line that is not blank."""
    return next((line.strip() for line in reversed(completion.splitlines()) if line.strip()), None)


def marked(completion: str) -> str | None:
    """The content of the last pair of answer tags, else the rest of the line after the last marker."""
    tags = list(_TAG.finditer(completion))
    for opening, closing in reversed(list(itertools.pairwise(tags))):
        if not opening[1] and closing[1]:
            return completion[opening.end() : closing.start()].strip() or None
    matches = list(_MARKER.finditer(completion))
    if not matches:
        return None
    return (matches[-1][1] or matches[-1][2] or "").strip(" \t\r*_`") or None


def first_sentence(text: str) -> str:
    """The text before the first period that a space follows: the answer, in `7. I had 3 tries.`"""
    return re.split(r"\.\s", text, maxsplit=1)[0]


def boxed(completion: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces close."""
    for opening in reversed(list(_BOX.finditer(completion))[-8:]):
        depth = 1
        for place in range(opening.end(), len(completion)):
            depth += {"{": 1, "}": -1}.get(completion[place], 0)
            if depth == 0:
                return completion[opening.end() : place].strip() or None
    return None


MAX_CHARACTERS = 2_000  # longer answers are rejected

_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|\\displaystyle\b|\\left\b|\\right\b|[$~]|\\[()\[\]]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION_NAME = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SYMBOLS = str.maketrans(
    {"π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "×": "\\times ", "·": "\\cdot ", "∪": "\\cup ", "∈": "\\in "}
)
_PLAIN_NAMES = re.compile(r"(?<![A-Za-z\\])(pi|infinity|infty)(?![A-Za-z])")
_PLAIN_ROOT = re.compile(r"(?<![A-Za-z])(?:\\sqrt\s*|sqrt)\(([^()]*)\)")
_BOLD = re.compile(r"(?<![\w*)])(\*\*|__)(?=\S)([^*_\n]+?)(?<=\S)\1(?![\w*])")
_ITALIC = re.compile(r"(?<![\w*)\\}])([*`])(?=\S)([^*`\n]+?)(?<=\S)\1(?![\w*])")
_PROSE_WORD = re.compile(r"(?<![a-z\\\\{])[a-z]{2,}")
MAX_COMMANDS = 50  # fractions in one answer: each costs a scan to the end of the answer
_UNIT_BEHIND = re.compile(r"\s?(?:(?:square|cubic|sq)\s)?[A-Za-z]+(?:(?:/|\sper\s)[A-Za-z]+)?(?:\^\{?[23]\}?)?")
_MATHS = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_ROOT_OR_PI = r"(?:\\sqrt\{[0-9]+\}\s*(?:\\pi(?![A-Za-z]))?|\\pi(?![A-Za-z]))"
_ANY_NUMBER = re.compile(
    rf"-?\\frac\{{[^{{}}]*(?:\{{[^{{}}]*\}})?[^{{}}]*\}}\{{[^{{}}]*(?:\{{[^{{}}]*\}})?[^{{}}]*\}}(?:\s*{_ROOT_OR_PI})?"
    rf"|-?[0-9]+/[0-9]+|(?:{NUMERAL.pattern})(?:\s*(?:\\?%|{_ROOT_OR_PI}))?|-?{_ROOT_OR_PI}"
)


def math_correct(completion: str, reference: str, tolerance: float) -> bool:
    """Whether the completion's final answer equals the reference.

    The final answer is the last `\\boxed{...}`; else what follows the last "answer:" or "answer is"; else the last
    line. Without a box, the mathematics at the end of a sentence counts: the text between its last dollar signs, or its
    last number, fraction, root or multiple of pi.
    """
    whole, within = final_answers(completion)
    return any(candidate is not None and same_answer(candidate, reference, tolerance) for candidate in (whole, within))


def final_answers(completion: str) -> tuple[str | None, str | None]:
    """The final answer as written, and the mathematics within it where it is a sentence."""
    if (answer := boxed(completion)) is not None:
        return answer, None
    after_marker = marked(completion)
    answer = after_marker or last_line(completion)
    if answer is None:
        return None, None
    answer = without_emphasis(answer[:MAX_CHARACTERS])
    if not _is_prose(answer) and isinstance(parse_term(normalise(answer)), Quantity | Group):
        return answer, _right_side(answer)
    return answer, _mathematics_in(first_sentence(answer) if after_marker else answer)


def same_answer(answer: str, reference: str, tolerance: float) -> bool:
    """Whether both have the same value, or the same text apart from white space, case and LaTeX formatting.

    `50%` is the number 0.5, and also matches a bare 50, for questions that ask for a percentage. A unit on only one
    side is ignored; `5 m` is not `5 cm`.
    """
    (ours, unit), (theirs, wanted_unit) = (_without_unit(_plain_text(text)) for text in (answer, reference))
    if not ours or (unit and wanted_unit and unit != wanted_unit):
        return False
    if same_term(parse_term(ours), parse_term(theirs), tolerance):
        return True
    (value, percent), (wanted, wanted_percent) = value_of(ours), value_of(theirs)
    if value is None or wanted is None or not (percent or wanted_percent):
        return False
    scale = Fraction(1, 100)
    exact = close(value * (scale if percent else 1), wanted * (scale if wanted_percent else 1), tolerance)
    return exact or (percent != wanted_percent and close(value, wanted, tolerance))


def normalise(text: str) -> str:
    """Remove LaTeX spacing, dollar signs, markdown, units and a leading `x =`; put LaTeX arguments into braces."""
    return _without_unit(_plain_text(text))[0]


def value_of(text: str) -> tuple[Fraction | None, bool]:
    """The value of a normalized text that is one rational number; and whether it had a percent sign."""
    bare = re.sub(r"\s*\\?%$", "", text)
    quantity = parse_quantity(bare)
    rational = quantity is not None and (quantity.radicand, quantity.power) == (1, 0)
    return quantity.value if quantity is not None and rational else None, bare != text


def without_emphasis(text: str) -> str:
    """Remove markdown's `**bold**`, `*italic*` and backticks; `2*3*4` and `2**3` stay."""
    return _ITALIC.sub(r"\2", _BOLD.sub(r"\2", text))


def _plain_text(text: str) -> str:
    text = without_emphasis(text[:MAX_CHARACTERS].strip()).translate(DASHES).translate(_SYMBOLS)
    text = text.replace("{,}", ",").replace("\\$", "").replace("\\!", "")
    text = _TEXT.sub(r" \1 ", _SPACING.sub(" ", text))
    text = _PLAIN_NAMES.sub(lambda found: "\\pi" if found[1] == "pi" else "\\infty", text)
    text = _FRACTION_NAME.sub(r"\\frac", _PLAIN_ROOT.sub(r"\\sqrt{\1}", text))
    text = _with_braces(_with_braces(text, "\\frac", 2), "\\sqrt", 1)
    text = re.sub(r"\s*([{}])\s*", r"\1", " ".join(text.split()))
    return without_name(text.strip(" .,;:*_`").strip())


def _without_unit(text: str) -> tuple[str, str | None]:
    text, unit = split_unit(text)
    return text.strip(" ,"), unit


def _with_braces(text: str, command: str, count: int) -> str:
    r"""`\frac12`, `\frac{1}3` and `\sqrt5` with each of the command's arguments in braces."""
    if not 0 < text.count(command) <= MAX_COMMANDS:
        return text
    pieces, place = [], 0
    for found in re.finditer(re.escape(command) + r"(?![A-Za-z])", text):
        if found.start() < place:
            continue
        pieces.append(text[place : found.end()])
        place = found.end()
        for _ in range(count):
            argument, place = _argument(text, place)
            pieces.append(argument)
    return "".join(pieces) + text[place:]


def _argument(text: str, place: int) -> tuple[str, int]:
    """The argument of a LaTeX command at `place`, in braces, and where it ends; unchanged where it is unclear."""
    start = place + len(text[place:]) - len(text[place:].lstrip())
    if text[start : start + 1] != "{":
        token = re.compile(r"[0-9A-Za-z]|\\[A-Za-z]+").match(text, start)
        return (f"{{{token[0]}}}", token.end()) if token else ("", place)
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            inner = text[start + 1 : end]
            nested = _with_braces(_with_braces(inner, "\\frac", 2), "\\sqrt", 1) if len(inner) < 200 else inner
            return f"{{{nested}}}", end + 1
    return "", place


# -- sentences ----------------------------------------------------------------------------------------------------


def _is_prose(text: str) -> bool:
    """Whether the text has words other than `and`, `or` and LaTeX command names."""
    return bool(set(_PROSE_WORD.findall(text.lower())) - {"and", "or"})


def _mathematics_in(sentence: str) -> str | None:
    """The mathematics at the end of a sentence."""
    formulas = list(_MATHS.finditer(sentence))
    last = formulas[-1] if formulas else None
    if last is not None and not any(character.isdigit() for character in sentence[last.end() :]):
        formula = next(group for group in last.groups() if group is not None)
        return _right_side(formula) or formula
    return _last_number(_plain_text(sentence))


def _right_side(text: str) -> str | None:
    """The text after the last equals sign: 7 in `3 + 4 = 7`."""
    left, sign, right = text.rpartition("=")
    return right.strip() if sign and left.strip() and right.strip() and left[-1:] not in "<>!" else None


def _last_number(text: str) -> str | None:
    """The last value of a sentence; None where it is part of an expression or of a choice: `2 + 3`, `5x`, `7 or 8`."""
    matches = list(_ANY_NUMBER.finditer(text))
    if not matches:
        return None
    before, after = text[: matches[-1].start()].rstrip(), text[matches[-1].end() :]
    behind = _UNIT_BEHIND.match(after)
    unit = behind[0] if behind and known_unit(behind[0]) else ""
    after = after[len(unit) :] if len(unit) > 1 else after
    in_expression = re.search(r"[-+*/^_×÷·{(]$|\\[a-z]+$", before) or re.match(r"[A-Za-z^({\\]|\s*[-+*/×÷·]", after)
    one_of_two = re.search(r"[0-9}]\s*(?:,|,?\s(?:or|and)(?:\s(?:maybe|perhaps|possibly))?)$", before)
    return None if in_expression or one_of_two else matches[-1].group().strip() + unit
