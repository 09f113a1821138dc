"""Pages for files of the repository that the documentation links to, so that every link also works offline."""

from __future__ import annotations

import os
import re
from pathlib import Path

from markdown_text import code

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDER = "repository"
MAX_BYTES = 60_000
"""A larger file is named and not shown."""

LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?\))")
ANY_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def target(link: str, page: Path) -> Path | None:
    """The file or folder of the repository outside docs/ that a link of a page leads to, if it is one."""
    place = Path(os.path.normpath(page.parent / link))  # a symbolic link is shown under its own name
    inside = place.is_relative_to(ROOT) and not place.is_relative_to(DOCS)
    return place.relative_to(ROOT) if inside and place.exists() else None


def page_of(path: Path) -> str:
    """The page of a file or folder of the repository. Text files of Markdown keep their own page name."""
    return f"{FOLDER}/{path.as_posix().lstrip('.')}.md".replace(".md.md", ".md")


def repository_pages() -> dict[str, str]:
    """The pages that links of docs/*.md lead to, and of what is in the folders among them."""
    pages: dict[str, str] = {}
    for page in sorted(DOCS.glob("*.md")):
        for found in LINK.finditer(page.read_text(encoding="utf-8")):
            place = target(found[2], page)
            if place is not None:
                pages |= shown(place)
    waiting = [ROOT / path.removeprefix(f"{FOLDER}/") for path in pages]
    while waiting:  # what the Markdown files among them link to
        page = waiting.pop()
        for place in _links_of(page):
            more = {name: text for name, text in shown(place).items() if name not in pages}
            waiting += [ROOT / name.removeprefix(f"{FOLDER}/") for name in more]
            pages |= more
    return pages


def _links_of(page: Path) -> list[Path]:
    if page.suffix != ".md" or not page.is_file():
        return []
    places = [target(found[2], page) for found in ANY_LINK.finditer(page.read_text(encoding="utf-8"))]
    return [place for place in places if place is not None]


def shown(path: Path) -> dict[str, str]:
    """The page of a file; of a folder also the pages of its files."""
    whole = ROOT / path
    if not whole.is_dir():
        return {page_of(path): file_page(path)}
    files = sorted(each.relative_to(ROOT) for each in whole.rglob("*") if each.is_file())
    files = [each for each in files if "__pycache__" not in each.parts]
    pages = {page_of(each): file_page(each) for each in files if _is_shown(each)}
    up = "../" * path.as_posix().count("/")
    lines: list[str] = []
    for each in files:
        name = code(each.relative_to(path).as_posix())
        link = up + page_of(each).removeprefix(f"{FOLDER}/")
        lines.append(f"- [{name}]({link})" if _is_shown(each) else f"- {name}")
    pages[page_of(path)] = _page(path, "\n".join(lines))
    return pages


def file_page(path: Path) -> str:
    """A file: Markdown as text, anything else as code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".md":
        return f"{EXCLUDED}{_relinked(text, path)}"
    return _page(path, f"```{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```")


def _relinked(markdown: str, path: Path) -> str:
    """A Markdown file of the repository whose links lead to pages of the site."""
    up = "../" * page_of(path).count("/")

    def lead(found: re.Match[str]) -> str:
        whole = Path(os.path.normpath(ROOT / path.parent / found[2]))
        if whole.is_relative_to(DOCS) and whole.exists():
            return f"{found[1]}{up}{whole.relative_to(DOCS).as_posix()}{found[3]}"
        place = target(found[2], ROOT / path)
        return found[0] if place is None else f"{found[1]}{up}{page_of(place)}{found[3]}"

    return ANY_LINK.sub(lead, markdown)


def linked(markdown: str, page: Path, from_page: str) -> str:
    """Markdown of a page of docs/ with its links into the repository led to the pages of this module."""
    up = "../" * from_page.count("/")

    def lead(found: re.Match[str]) -> str:
        place = target(found[2], page)
        return found[0] if place is None else f"{found[1]}{up}{page_of(place)}{found[3]}"

    return LINK.sub(lead, markdown)


EXCLUDED = "---\nsearch:\n  exclude: true\n---\n\n"


def _page(path: Path, body: str) -> str:
    return f"{EXCLUDED}# {code(path.as_posix())}\n\n{body}"


def _is_shown(path: Path) -> bool:
    whole = ROOT / path
    if whole.stat().st_size > MAX_BYTES:
        return False
    try:
        whole.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
