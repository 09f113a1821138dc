"""Every equation of docs/mathematics.md names the code that implements it, and that code exists."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "mathematics.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(tether\.[\w.]+)`", PAGE)))
SECTIONS = re.split(r"^(?=#{2,3} )", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_that_is_named_exists(name: str):
    module, _, symbol = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), symbol)), name


@pytest.mark.parametrize(
    "section", [section for section in SECTIONS if "$$" in section], ids=lambda text: text.split("\n")[0]
)
def test_a_section_with_an_equation_names_its_code(section: str):
    assert re.search(r"`tether\.(ops|algorithms)\.", section), section.partition("\n")[0]


@pytest.mark.parametrize(
    "topic",
    [
        *("reinforce_loss", "gae", "clip_loss", "clip_cases", "value_loss", "kl_estimate", "FixedKL", "AdaptiveKL"),
        *("ProportionalKL", "pairwise_losses", "kwise_total", "dpo_losses", "group_advantages", "leave_one_out"),
        *("line_search", "conjugate_gradient", "fisher_vector_product", "kl_penalty_loss", "token_rewards"),
    ],
)
def test_the_page_covers(topic: str):
    assert any(name.endswith(f".{topic}") for name in NAMES)


def test_equations_are_delimited_in_pairs():
    assert len(re.findall(r"^\$\$$", PAGE, flags=re.MULTILINE)) % 2 == 0
    for line in re.sub(r"^\$\$$.*?^\$\$$", "", PAGE, flags=re.MULTILINE | re.DOTALL).splitlines():
        assert line.count("$") % 2 == 0, line
