"""Notes, tags and groups, settings side by side, folded charts, empty pages and dialogs, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from studio_browser import Served, Visitor, expect, record_steps, serving, small_workspace, start_run

from tether.store.database.open import workspace_at

OWN_PAGES = ["#/runs", "#/sweeps", "#/label", "#/train", "#/arena", "#/chat", "#/nowhere"]

MIDDLE = """() => {
  const box = document.querySelector(".empty").getBoundingClientRect();
  const words = document.querySelector(".empty p").getBoundingClientRect();
  return Math.abs((words.left + words.right) / 2 - innerWidth / 2) / innerWidth + (box.height > 200 ? 0 : 1);
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(small_workspace(tmp_path_factory.mktemp("notes"))) as found:
        config = {"method": "ppo", "model": {"path": "tiny-bytes"}, "run": {"seed": 8}}
        recorder = start_run(found.workspace, "third", steps=5, config=config)
        record_steps(recorder, range(5))
        recorder.close("done")
        yield found


def test_notes_tags_and_a_group_are_written_with_the_keyboard_and_found_again(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    visitor.press("e")
    page.keyboard.type("Too far from the start. <b>")
    visitor.press("Tab")
    page.keyboard.type("kl two-words, small")
    visitor.press("Tab")
    page.keyboard.type("sweep one")
    visitor.press("Enter")
    expect(page.locator(".note-text")).to_have_text("Too far from the start. <b>")
    expect(page.locator(".notes .tag")).to_have_text(["sweep one", "kl", "two-words", "small"])
    page.locator(".notes a.tag", has_text="small").click()
    expect(page.locator("table.runs td.name > a")).to_have_text(["first"])
    expect(page.locator(".group-head th")).to_contain_text("sweep one")
    page.locator(".filters button", has_text="small").click()
    expect(page.locator("table.runs td.name > a")).to_have_count(4)
    expect(page.locator(".group-head th")).to_have_text(["sweep one 1", "No group 3"])
    page.get_by_label("Group the runs").select_option("method")
    expect(page.locator(".group-head th")).to_have_text(["ppo 3", "sft 1"])
    page.get_by_label("Find a run").fill("too far")
    expect(page.locator("table.runs td.name > a")).to_have_text(["first"])
    page.get_by_label("Find a run").fill("no such run")
    page.get_by_role("button", name="Show all runs").click()
    expect(page.locator("table.runs td.name > a")).to_have_count(4)


def test_a_wrong_tag_is_told_in_the_dialog_which_stays(browser, served: Served):
    visitor = Visitor(browser, served)
    page = visitor.go(f"#/run/{served.run_id('second')}")
    visitor.press("e")
    page.get_by_label("Tags").fill("#wrong")
    page.locator("dialog button.main").click()
    expect(page.locator("dialog .dialog-error")).to_contain_text("tags: '#wrong' is not a tag")
    expect(page.locator("#notices")).to_be_empty()
    page.get_by_label("Tags").fill("right")
    page.locator("dialog button.main").click()
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator(".notes .tag")).to_have_text(["right"])
    visitor.close()


def test_a_dialog_closes_on_escape_and_when_another_page_is_opened(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    for close in (lambda: visitor.press("Escape"), lambda: page.evaluate("location.hash = '#/runs'")):
        page.locator(".notes button").click()
        expect(page.locator("dialog")).to_be_visible()
        close()
        expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator("h1")).to_have_text("Runs")


def test_compared_runs_show_the_settings_that_differ(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}?with={served.run_id('third')}")
    expect(page.locator(".diff thead th")).to_have_text(["Setting", "first", "third"])
    expect(page.locator(".diff tbody tr")).to_have_text(["run.seed78"])


def test_a_curve_that_is_zero_throughout_is_folded_away_until_it_is_not(visitor: Visitor, served: Served):
    recorder = start_run(served.workspace, "zero", steps=9)
    try:
        record_steps(recorder, range(3))  # their logprob_diff is 0
        page = visitor.go(f"#/run/{served.run_id('zero')}")
        fold = page.locator("details.flat:not([hidden])")
        expect(fold.locator("summary")).to_have_text("Zero throughout: Sampler gap")
        expect(page.locator(".chart[data-metric='logprob_diff'] canvas")).to_be_hidden()
        fold.locator("summary").click()
        expect(page.locator(".chart[data-metric='logprob_diff'] canvas")).to_be_visible()
        expect(page.locator("#connection")).to_have_text("live")
        recorder.record(3, {"score": 0.1, "logprob_diff": 0.5})
        expect(page.locator("details.flat:not([hidden])")).to_have_count(0)
        expect(page.locator(".chart[data-metric='logprob_diff'] .readout")).to_have_text("0.5")
    finally:
        recorder.close("done")


def test_every_page_of_an_empty_workspace_says_one_sentence_and_offers_what_to_do(browser, tmp_path):
    with serving(workspace_at(tmp_path / "runs", None)) as served:
        for size in ({"width": 1280, "height": 800}, {"width": 390, "height": 844}):
            visitor = Visitor(browser, served, viewport=size)
            for address in OWN_PAGES:
                page = visitor.go(address)
                expect(page.locator(".empty p")).to_have_count(1)
                expect(page.locator(".empty").locator("a.main, button.main")).to_have_count(1)
                assert page.evaluate(MIDDLE) < 0.02, address
            assert visitor.faults == []
            visitor.close()


def test_one_family_of_letters(visitor: Visitor, served: Served):
    families = """() => [...new Set([...document.querySelectorAll("body *")]
      .filter((each) => each.checkVisibility() && !each.closest("code, pre, kbd, .mono, .tokens, .answer-text"))
      .map((each) => getComputedStyle(each).fontFamily))].length"""
    for address in ("#/runs", f"#/run/{served.run_id('first')}", "#/label", "#/start"):
        assert visitor.go(address).evaluate(families) == 1, address


def test_whatever_has_the_focus_shows_it(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    seen = set()
    for _ in range(25):
        visitor.press("Tab")
        named, outline = page.evaluate(
            "() => { const at = document.activeElement; const look = getComputedStyle(at);"
            " return [at.textContent.slice(0, 20) || at.getAttribute('aria-label') || at.tagName, look.outlineStyle]; }"
        )
        seen.add(named)
        assert outline != "none", named
    assert {"Runs", "Answers, token by to", "Smoothing", "PNG"} <= seen, seen
