"""One turn of a conversation in the ways that people write it."""

from __future__ import annotations

import json
import re
from typing import Any

from tether.data.formats import shown
from tether.errors import DataError
from tether.types import Message

# Who speaks, in ShareGPT's words.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content")
_HH = re.compile(r"\n\n(Human|Assistant): ?")


def message_of(item: Any, place: str) -> Message:
    """A message from {role, content} or {from, value}; what chat templates read of tools is kept."""
    if not isinstance(item, dict):
        raise DataError(f"{place} must be {{role: text, content: text}}, not {shown(item)}")
    if item.get("role") is None and item.get("from") is not None:
        return _from_sharegpt(item, place)
    content = _content(item.get("content"), place)
    calls = item.get("tool_calls") or []
    if not isinstance(item.get("role"), str) or (content is None and not calls):
        raise DataError(f"{place} must be {{role: text, content: text}}, not {shown(item)}")
    message = Message(role=item["role"], content=content or "")
    if calls:
        message["tool_calls"] = [_call(call, place) for call in calls]
    for name in _KEPT:
        if isinstance(item.get(name), str):
            message[name] = item[name]
    return message


def _from_sharegpt(item: dict[str, Any], place: str) -> Message:
    speaker, value = item["from"], item.get("value")
    if speaker not in SPEAKERS or not isinstance(value, str):
        raise DataError(f"{place} must be {{from: human or gpt or system or tool, value: text}}, not {shown(item)}")
    if speaker != "function_call":
        return Message(role=SPEAKERS[speaker], content=value)
    try:
        call = json.loads(value)
    except ValueError:
        call = None
    if not isinstance(call, dict) or "name" not in call:
        return Message(role="assistant", content=value)
    return Message(role="assistant", content="", tool_calls=[_call({"type": "function", "function": call}, place)])


def _content(content: Any, place: str) -> str | None:
    """A text; or a list of parts, all of which are texts."""
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise DataError(f"{place} must be {{role: text, content: text}}, not content {shown(content)}")
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place} has content that is not text, such as an image: Tether trains on text alone")
    return "".join(map(str, texts))


def _call(call: Any, place: str) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI's are JSON text, which templates would quote once more."""
    if not isinstance(call, dict):
        raise DataError(f"{place} has a tool call that is not an object, but {shown(call)}")
    found = {name: value for name, value in call.items() if value is not None}
    function = found.get("function", found)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return found
        changed = {**function, "arguments": parsed}
        return {**found, "function": changed} if "function" in found else changed
    if isinstance(arguments, dict):  # Arrow gives every call the arguments of all
        changed = {**function, "arguments": {name: value for name, value in arguments.items() if value is not None}}
        return {**found, "function": changed} if "function" in found else changed
    return found


def from_marked_text(text: str) -> tuple[Message, ...] | None:
    """The turns of a text marked "\\n\\nHuman: ... \\n\\nAssistant: ..." (Anthropic's HH); None where it is none."""
    if not text.lstrip().startswith("Human:"):
        return None
    pieces = _HH.split("\n\n" + text.lstrip())[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        Message(role=roles[mark], content=said.strip()) for mark, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    return tuple(turns)


def common_prefix(one: str, other: str) -> int:
    """How many letters two texts have in common at their beginnings, up to the end of a word in both."""
    shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    while shared and not (one[shared : shared + 1].isspace() or one[shared - 1].isspace()):
        shared -= 1
    return len(one[:shared].rstrip())
