"""The hook of mkdocs.yml: adds the generated pages to the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from repository_pages import linked, repository_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for path, markdown in repository_pages().items():
        files.append(File.generated(config, path, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to pages of the site."""
    del config, files
    if page.file.abs_src_path is None or page.file.generated_by is not None:
        return markdown
    return linked(markdown, Path(page.file.abs_src_path), page.file.src_uri)
