"""How every page looks to people who see little, use no mouse, or hold a phone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from studio_browser import Served, Visitor, a_rollout, expect, serving, small_workspace, start_run

sys.path.append(str(Path(__file__).parents[1] / "sweeps"))  # sweep_folders.py

from sweep_folders import make_sweep

PHONE = {"viewport": {"width": 375, "height": 740}}
WIDE = {"viewport": {"width": 1280, "height": 860}}

CONTRASTS = """() => {
  const channel = (value) => { const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const pen = canvas.getContext("2d", {willReadFrequently: true});
  const over = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return pen.getImageData(0, 0, 1, 1).data;
  };
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const passed = "svg, .unseen, .skip, noscript, option, :disabled";
    if (!own || !element.checkVisibility() || element.closest(passed)) continue;
    const grounds = [];
    for (let each = element; each; each = each.parentElement) grounds.unshift(getComputedStyle(each).backgroundColor);
    const ground = over(["white", ...grounds]);
    const text = over(["white", ...grounds, getComputedStyle(element).color]);
    const [light, dark] = [luminance(text), luminance(ground)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const words = element.textContent.slice(0, 30);
    if (ratio < 4.5) bad.push(`${element.tagName}.${element.className} "${words}" ${ratio.toFixed(2)}`);
  }
  return bad;
}"""

UNNAMED = """() => [...document.querySelectorAll("button, a, input, select, textarea")]
  .filter((each) => each.checkVisibility())
  .filter((each) => !(each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length || each.title))
  .map((each) => each.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("look")
    make_sweep(root)
    with serving(small_workspace(root)) as found:
        queue = found.api("POST", "label/queues", json={"name": "pairs", "kind": "pair", "axes": ["overall"]})["id"]
        records = [{"prompt": "which?", "chosen": "this", "rejected": "that " * 40}]
        found.api("POST", f"label/queues/{queue}/fill", json={"from": "file", "records": records})
        recorder = start_run(found.workspace, "long", steps=1)
        words = [f" word{place}" for place in range(600)]  # one line that never ends
        recorder.record(0, {"score": 1.0}, [a_rollout(0, row, "a long question " * 40, words, 1.0) for row in range(2)])
        recorder.close("done")
        yield found


def pages(served: Served) -> list[str]:
    run = served.run_id("first")
    tokens = f"#/run/{run}/tokens?step=20&row=2"
    long = f"#/run/{served.run_id('long')}/tokens?step=0&row=0"
    label = ["#/label", "#/label/1", "#/label/1/items"]
    sweeps = ["#/sweeps", "#/sweep/study"]
    return ["#/runs", "#/start", f"#/run/{run}", tokens, long, *sweeps, *label, "#/train", "#/arena", "#/chat"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_page_can_be_read(browser, served: Served, theme: str, size: dict):
    visitor = Visitor(browser, served, color_scheme=theme, **size)
    for address in pages(served):
        page = visitor.go(address)
        assert page.evaluate(CONTRASTS) == [], address
        assert page.evaluate(UNNAMED) == [], address
        sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert sideways <= 0, f"{address} is {sideways} px too wide"
    assert visitor.faults == []
    visitor.close()


def test_every_page_lists_its_keys_and_escape_closes_the_list(browser, served: Served):
    visitor = Visitor(browser, served)
    for address in pages(served):
        page = visitor.go(address)
        page.evaluate("document.activeElement.blur()")
        visitor.press("?")
        expect(page.locator("dialog.keys")).to_be_visible()
        expect(page.locator("dialog.keys dd", has_text="Light or dark")).to_have_count(1)
        visitor.press("Escape")
        expect(page.locator("dialog.keys")).to_have_count(0)
    visitor.close()


def test_pages_are_reached_with_two_keys(browser, served: Served):
    visitor = Visitor(browser, served)
    page = visitor.go("#/runs")
    for letter, title in (("l", "Label"), ("t", "Train from votes"), ("a", "Arena"), ("r", "Runs")):
        visitor.press("g", letter)
        expect(page.locator("h1")).to_have_text(title)
    visitor.close()


def test_the_chosen_theme_stays(browser, served: Served):
    visitor = Visitor(browser, served, color_scheme="light")
    page = visitor.go("#/runs")
    visitor.press("d")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    visitor.close()
