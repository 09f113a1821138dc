"""What is wrong with an item of a list such as `reward.parts`, in one line that names the item and the repair."""

from __future__ import annotations

from difflib import get_close_matches

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from tether.config.schema import in_words


def explain_item(
    problem: ErrorDetails, key: str, inside: tuple[int | str, ...], kinds: dict[str, type[BaseModel]], where: str
) -> str:
    """One validation error; `inside` is its place within the list: (index, kind, field, ...)."""
    index, kind, field = (*inside, None, None, None)[:3]
    item = f"{key}[{index}]" if index is not None else key
    named = f"{item} ({kind}) in {where}" if kind in kinds else f"{item} in {where}"
    settings = kinds.get(str(kind))
    given = problem.get("input")
    match problem["type"]:
        case "union_tag_not_found":
            return f"{named}: say its kind, one of {', '.join(kinds)}"
        case "union_tag_invalid":
            tag = str(problem.get("ctx", {}).get("tag"))
            close = get_close_matches(tag, kinds, n=1)
            return f"{named}: unknown kind {tag}: " + (f"did you mean {close[0]}?" if close else _choose(list(kinds)))
        case "extra_forbidden" if settings is not None:
            known = list(settings.model_fields)
            close = get_close_matches(str(field), known, n=1)
            return f"{named}: unknown key {field}: " + (f"did you mean {close[0]}?" if close else _choose(known))
        case "missing" if settings is not None:
            return f"{named}: {field} is missing ({settings.model_fields[str(field)].description})"
        case "value_error":
            return f"{named}: {problem.get('ctx', {}).get('error', problem['msg'])}"
        case "string_pattern_mismatch":
            return f"{named}: {field} {given!r} does not match {problem.get('ctx', {}).get('pattern')}"
        case _ if settings is not None and field in settings.model_fields:
            about = settings.model_fields[str(field)]
            return f"{named}: {field} must be {in_words(about.annotation, about.metadata)}, not {given!r}"
        case _ if index is not None:
            return f"{named}: expected a mapping such as {{kind: ended}}, was given {given!r}"
        case _:
            return f"{named}: expected a list of mappings such as [{{kind: ended}}], was given {given!r}"


def _choose(known: list[str]) -> str:
    return f"choose one of {', '.join(known)}"
