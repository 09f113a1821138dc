"""The names of a capability suite: Tether's own parts, and tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence

SUITE_PARTS = ("perplexity", "arithmetic", "instructions", "repetition")
ALL = "all"
LM_EVAL = "lm-eval:"


def checked_suite(names: Sequence[str]) -> tuple[str, ...]:
    """The names without repetition, `all` spelled out; raises ValueError for a name that is not known."""
    found: dict[str, None] = {}
    for name in names:
        if name == ALL:
            found |= dict.fromkeys(SUITE_PARTS)
        elif name in SUITE_PARTS or (name.startswith(LM_EVAL) and name != LM_EVAL):
            found[name] = None
        else:
            known = ", ".join((*SUITE_PARTS, ALL))
            raise ValueError(
                f"{name!r} is no part of the suite: name {known}, or {LM_EVAL}TASK, such as lm-eval:arc_easy"
            )
    return tuple(found)


def split_suite(words: str) -> tuple[str, ...]:
    """The names in `perplexity,lm-eval:hellaswag,arc_easy`: all names after `lm-eval:` are tasks of the harness."""
    own, found, tasks = words.partition(LM_EVAL)
    names = [word.strip() for word in own.split(",") if word.strip()]
    if found:
        each = [word.strip() for word in tasks.split(",") if word.strip()]
        names += [LM_EVAL + word.removeprefix(LM_EVAL) for word in each or [""]]
    return checked_suite(names)
