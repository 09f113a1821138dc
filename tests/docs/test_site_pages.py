"""The generated reference holds every key, command, option and public name; what cannot be described fails."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from pydantic import Field

from tether.config import RECIPES
from tether.config.base import Settings
from tether.config.recipes import DemoRecipe
from tether.config.schema import describe, kinds_of, sections

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

sys.path.insert(0, str(DOCS / "generate"))
import command_pages  # noqa: E402
import config_pages  # noqa: E402
import markdown_text  # noqa: E402
import repository_pages  # noqa: E402
import site_hook  # noqa: E402

PAGES = site_hook.generated_pages()


# -- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", RECIPES)
def test_every_key_of_a_method_is_described_on_its_section_s_page(method: str):
    listed = PAGES[f"reference/config/methods/{method}.md"]
    for leaf in describe(RECIPES[method]):
        page = PAGES[f"reference/config/sections/{leaf.section}.md"]
        anchor = config_pages.anchor(leaf.key, method)
        _, found, rest = page.partition(f"#### `{leaf.key}` {{ #{anchor} .key }}")
        assert found, f"{leaf.key} of {method} is not on the page"
        entry = rest.partition("####")[0]
        assert markdown_text.escaped(leaf.type) in entry
        assert markdown_text.escaped(leaf.description).partition("docs/")[0] in entry
        [row] = [line for line in listed.splitlines() if line.startswith(f"| [`{leaf.key}`]")]
        assert f"(../sections/{leaf.section}.md#{anchor})" in row
        assert markdown_text.cell(f"`{leaf.default_text}`") in row or "required" in row


def test_a_method_s_own_default_is_named_beside_the_others():
    [place] = [leaf for leaf in describe(RECIPES["ppo"]) if leaf.key.startswith("kl.") and leaf.default == "reward"]
    [own] = [leaf for leaf in describe(RECIPES["grpo"]) if leaf.key == place.key]
    assert own.default == "loss"
    entry = PAGES["reference/config/sections/kl.md"].partition(f"`{place.key}`")[2].partition("####")[0]
    assert "default `reward` (grpo: `loss`)" in entry


def test_anchors_of_a_section_page_are_unique():
    for path, page in PAGES.items():
        anchors = re.findall(r"^#+ .*\{ #(\S+)", page, flags=re.MULTILINE)
        assert len(anchors) == len(set(anchors)), path


def test_every_kind_of_reward_part_and_its_keys_are_there():
    page = PAGES["reference/config/reward-parts.md"]
    kinds = {
        kind: settings for leaf in describe(RECIPES["ppo"]) for kind, settings in kinds_of(leaf.annotation).items()
    }
    assert len(kinds) > 5
    for kind, settings in kinds.items():
        assert f"## `{kind}`" in page
        for name in set(settings.model_fields) - {"kind"}:
            assert f"#### `{name}` {{ #{kind}.{name} .key }}" in page


def test_the_demo_s_own_keys_are_there():
    page = PAGES["reference/config/demo.md"]
    recipes = [name for name, settings in sections(DemoRecipe).items() if settings in RECIPES.values()]
    own = [leaf.key for leaf in describe(DemoRecipe) if leaf.section not in recipes]
    assert len(own) > 5
    assert all(f"#### `{key}`" in page for key in own)


def test_a_key_without_a_description_fails(monkeypatch: pytest.MonkeyPatch):
    class Silent(Settings):
        """Says nothing of its key."""

        told: int = Field(default=1, description="What it is.")
        untold: int = 2

    class Recipe(Settings):
        method: ClassVar[str] = "silent"
        part: Silent = Field(default_factory=Silent)

    monkeypatch.setattr(config_pages, "RECIPES", {"silent": Recipe})
    config_pages.all_sections.cache_clear()
    try:
        with pytest.raises(config_pages.MissingDescriptionError, match=r"part\.untold has no description"):
            config_pages.section_page("part")
    finally:
        config_pages.all_sections.cache_clear()


# -- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", command_pages.cli.COMMANDS)
def test_every_option_of_a_command_is_there(name: str):
    page = PAGES[f"reference/commands/{name}.md"]
    parser = command_pages.parser_of(name, [])
    if parser is None:
        assert "Usage: tether" in page and "--help" in page
        return
    for action in parser._actions:
        for word in action.option_strings or [str(action.metavar or action.dest)]:
            assert f"`{word}" in page, f"tether {name}: {word}"
        if action.help and action.help != argparse.SUPPRESS:
            assert markdown_text.cell(markdown_text.escaped(action.help % vars(action))) in page


def test_a_subcommand_is_on_the_page_of_its_command():
    page = PAGES["reference/commands/models.md"]
    assert "## `tether models pull`" in page and "`--force`" in page


def test_building_the_pages_runs_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    command_pages.command_pages()
    assert list(tmp_path.iterdir()) == []


# -- Python -------------------------------------------------------------------------------------------------------


def test_every_public_function_and_class_is_there():
    import tether.algorithms
    import tether.ops

    for package in (tether.ops, tether.algorithms):
        for file in files(package).iterdir():
            name = file.name.removesuffix(".py")
            if not file.name.endswith(".py") or name == "__init__":
                continue
            page = PAGES[f"reference/python/{package.__name__.rpartition('.')[2]}/{name}.md"]
            for found in re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", file.read_text(), flags=re.MULTILINE):
                assert f"## `{found}` {{ #{found} }}" in page, f"{package.__name__}.{name}.{found}"


def test_a_signature_keeps_its_defaults_and_its_star():
    [page] = [page for path, page in PAGES.items() if "/ops/" in path and "## `clip_loss`" in page]
    shown = page.partition("## `clip_loss`")[2].partition("```python\n")[2].partition("```")[0]
    wanted = ["def clip_loss(", "    *,", "    clip_low: float,", "    dual_clip: float | None = None,", ") -> Tensor"]
    assert [line for line in wanted if line in shown.splitlines()] == wanted


def test_the_remark_behind_a_field_is_kept():
    assert "token_ids: Tensor  # (T,) int64" in PAGES["reference/python/types.md"]


def test_docstrings_keep_formulas_as_they_stand():
    page = PAGES["reference/python/ops/advantages.md"]
    assert "```text\ndelta_t = r_t + gamma * V_(t+1) - V_t\n" in page


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a_b and `c_d`", "a&#95;b and `c_d`"),
        ("*sampled* tokens", "*sampled* tokens"),
        ("gamma * lam * A", "gamma &#42; lam &#42; A"),
        ("KL(p || q) < 1", "KL(p &#124;&#124; q) &#60; 1"),
        ("**`x` is one**", "**`x` is one**"),
    ],
)
def test_text_means_itself(text: str, wanted: str):
    assert markdown_text.escaped(text) == wanted


# -- the whole ----------------------------------------------------------------------------------------------------


def test_what_is_generated_is_the_same_each_time():
    words = "import sys, json; sys.path.insert(0, 'docs/generate'); import site_hook"
    words += "; print(json.dumps(site_hook.generated_pages()))"
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "COLUMNS": f"{60 + 40 * int(seed)}"}
        done = subprocess.run(
            [sys.executable, "-c", words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1


def test_links_between_generated_pages_lead_somewhere():
    everything = set(PAGES) | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    for path, page in PAGES.items():
        if path.startswith("repository/"):
            continue
        for link in re.findall(r"\]\(([^)#\s]+\.md)", page):
            target = os.path.normpath(Path(path).parent / link)
            assert target in everything, f"{path}: {link}"


def test_every_page_is_in_the_navigation_once():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    nav = yaml.safe_load(text)["nav"]
    assert site_hook.REFERENCE in nav
    named: list[str] = []

    def gather(entry: object) -> None:
        if isinstance(entry, str):
            named.append(entry)
        elif isinstance(entry, dict):
            for value in entry.values():
                gather(value)
        else:
            assert isinstance(entry, list)
            for value in entry:
                gather(value)

    gather([entry for entry in nav if entry != site_hook.REFERENCE])
    gather(site_hook.reference_nav())
    pages = [path.name for path in DOCS.glob("*.md")]
    pages += [path for path in PAGES if not path.startswith("repository/")]
    assert sorted(path for path in named if not path.startswith("repository/")) == sorted(pages)


def test_links_out_of_docs_lead_to_pages_of_the_site():
    page = DOCS / "demo.md"
    text = "[a](../recipes/demo.yaml) [b](../recipes) [c](data.md) [d](../nothing.txt)"
    assert repository_pages.linked(text, page, "demo.md") == (
        "[a](repository/recipes/demo.yaml.md) [b](repository/recipes.md) [c](data.md) [d](../nothing.txt)"
    )
    assert (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8").strip() in PAGES[
        "repository/recipes/demo.yaml.md"
    ]


def test_names_of_functions_lead_to_the_reference():
    shown = site_hook.with_api_links("`tether.ops.advantages.gae` and `tether.nothing`", "mathematics.md")
    assert shown == "[`tether.ops.advantages.gae`](reference/python/ops/advantages.md#gae) and `tether.nothing`"


def test_the_build_is_strict_and_nothing_hides_its_warnings():
    """`--quiet` would: warnings that are not logged are not counted."""
    rule = re.search(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert rule and "--strict" in rule[0] and "-q" not in rule[0]


def test_vendored_files_have_their_licences():
    for folder in (path for path in (DOCS / "assets").iterdir() if path.is_dir()):
        assert (folder / "LICENSE").is_file(), folder
