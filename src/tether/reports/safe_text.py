"""Make untrusted text safe for a page, a drawing, a Markdown file or a terminal.

A language model can write anything: tags, quotes, control codes, lone surrogates, marks that reverse the direction of
text. None of it may become part of the document's markup, stop the file from being written, or look like our own text.
"""

from __future__ import annotations

import html
import re

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")
# Characters that reverse or hide the text around them, or have no meaning in a file; shown as a symbol instead.
_UNSEEN = re.compile("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Text without control codes, lone surrogates or direction marks; each is replaced by a symbol."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = "".join(letter if letter in "\n\t" or not _is_control(letter) else _picture(letter) for letter in text)
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def escape(text: str) -> str:
    """Cleaned text, escaped for an HTML or XML element or a quoted attribute."""
    return html.escape(clean(text), quote=True)


def markdown(text: str) -> str:
    """Cleaned text as one line of Markdown without markup, also valid within a table."""
    line = " ".join(clean(text).split())
    escaped = _MARKDOWN.sub(r"\\\1", line)
    return escaped.replace("://", ":\\//").replace("www.", "www\\.").replace("@", "\\@")


def fenced(text: str, language: str = "") -> str:
    """Cleaned text as a fenced Markdown block; the fence is longer than any in the text."""
    body = clean(text).rstrip("\n")
    longest = max((len(run) for run in re.findall(r"`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{body}\n{fence}"


def visible(text: str) -> str:
    """A model's text for a terminal; control characters, which could move the cursor, are shown as a box."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def duration(seconds: float) -> str:
    """Format a duration: 8 s, 1 min 05 s, 2 h 03 min."""
    if not 0.0 <= seconds < 1e9:
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _is_control(letter: str) -> bool:
    return letter < " " or "\x7f" <= letter <= "\x9f"


def _picture(letter: str) -> str:
    """The symbol for a control code: ␀, ␛, and so on."""
    return chr(0x2400 + ord(letter)) if letter < " " else "\N{SYMBOL FOR DELETE}"
