"""The site itself: built strictly by mkdocs, and read by a real browser from files, without a network.

Skipped where `make docs` has not installed its packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv" / "site"  # what `make docs` installs
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 800}


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PACKAGES.is_dir():
        pytest.skip("`make docs` has not been run: its packages are not here")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def test_a_page_loads_nothing_from_the_network(site: Path):
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    assert not [str(page) for page in pages if loaded.search(page.read_text(encoding="utf-8"))]
    assert not list(site.rglob("*.py"))
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//""", sheet.read_text(encoding="utf-8")), sheet


def test_every_anchor_of_a_generated_page_is_in_the_site(site: Path):
    sys.path.insert(0, str(ROOT / "docs" / "generate"))
    import site_hook

    for path, text in site_hook.generated_pages().items():
        wanted = re.findall(r"^#+ .*\{ #(\S+)", text, flags=re.MULTILINE)
        page = site / path.replace("README.md", "index.md").replace(".md", ".html")
        found = set(re.findall(r'id="([^"]+)"', page.read_text(encoding="utf-8"))) if wanted else set()
        assert set(wanted) <= found, path


def test_a_broken_link_or_anchor_fails_the_build(site: Path, tmp_path: Path):
    del site
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "README.md").write_text("# Here\n\n[x](nothing.md) [y](#nowhere)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[0]
    hook = "hooks: [docs/generate/site_hook.py]"
    assert hook in settings
    (tmp_path / "mkdocs.yml").write_text(settings.replace(hook, "") + "nav: [README.md]\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "'nothing.md'" in done.stderr and "'#nowhere'" in done.stderr


def test_equations_are_rendered(site: Path, browser):
    page = browser.new_page(viewport=DESKTOP)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.goto((site / "mathematics.html").as_uri())
    page.wait_for_selector(".arithmatex .katex")
    counts = [
        page.locator(place).count() for place in (".arithmatex", ".arithmatex > .katex, .arithmatex > .katex-display")
    ]
    page.close()
    assert counts[0] > 50 and counts[0] == counts[1]
    assert problems == []


def test_search_finds_a_key_in_a_page_opened_from_a_file(site: Path, browser):
    context = browser.new_context(viewport=DESKTOP)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.fill("[data-md-component=search-query]", "minibatch_size")
    page.wait_for_selector(".md-search-result__link")
    links = page.eval_on_selector_all(".md-search-result__link", "all => all.map(one => one.getAttribute('href'))")
    context.close()
    assert any(link.endswith("#ppo.minibatch_size") for link in links), links
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_no_page_is_wider_than_the_screen(site: Path, browser, size: dict[str, int]):
    page = browser.new_page(viewport=size)
    names = [f"{path.stem}.html" for path in sorted((ROOT / "docs").glob("*.md")) if path.stem != "README"]
    names += ["index.html", "reference/config/methods/ppo.html", "reference/commands/eval.html"]
    names += ["reference/config/sections/ppo.html", "reference/python/types.html", "reference/commands/index.html"]
    wide: list[str] = []
    for name in names:
        page.goto((site / name).as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(name)
    page.close()
    assert wide == []
