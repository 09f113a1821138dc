"""The hook of mkdocs.yml: adds the generated pages and the reference to the site."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from command_pages import command_nav, command_pages
from config_pages import config_nav, config_pages
from python_pages import NAME, anchors, python_nav, python_pages
from repository_pages import linked, repository_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]

REFERENCE = "Reference"


def generated_pages() -> dict[str, str]:
    """Path below docs/ -> Markdown, of every page that no file holds."""
    return {
        f"{REFERENCE.lower()}/index.md": reference_index(),
        **config_pages(),
        **command_pages(),
        **python_pages(),
        **repository_pages(),
    }


def reference_index() -> str:
    """The parts of the reference."""
    return (
        "# Reference\n\nGenerated from the code.\n\n"
        "- [Configuration](config/index.md): every key of a recipe.\n"
        "- [Command line](commands/index.md): every command and its options.\n"
        "- [Python](python/index.md): types, protocols, mathematics and algorithms.\n"
    )


def reference_nav() -> list[object]:
    """The reference in the navigation."""
    return [
        f"{REFERENCE.lower()}/index.md",
        {"Configuration": config_nav()},
        {"Command line": command_nav()},
        {"Python": python_nav()},
    ]


def with_api_links(markdown: str, page: str) -> str:
    """Code spans such as `tether.ops.kl.kl_estimate` as links to the reference."""
    known = anchors()
    folder = Path(page).parent

    def lead(found: re.Match[str]) -> str:
        if found[1] not in known:
            return found[0]
        path, hash_sign, anchor = known[found[1]].partition("#")
        return f"[{found[0]}]({os.path.relpath(path, folder)}{hash_sign}{anchor})"

    return NAME.sub(lead, markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the reference where the navigation names it."""
    assert config.nav is not None
    config.nav = [{REFERENCE: reference_nav()} if entry == REFERENCE else entry for entry in config.nav]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for path, markdown in generated_pages().items():
        files.append(File.generated(config, path, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to pages of the site, and names of functions to the reference."""
    del config, files
    path = page.file.src_uri
    if page.file.abs_src_path is None or page.file.generated_by is not None:
        return markdown
    return with_api_links(linked(markdown, Path(page.file.abs_src_path), path), path)
