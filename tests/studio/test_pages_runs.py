"""Runs, Run and the token microscope, in a real browser and with the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from studio_browser import Served, Visitor, a_rollout, expect, record_steps, serving, small_workspace, start_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(small_workspace(tmp_path_factory.mktemp("studio"))) as found:
        yield found


def test_the_list_says_of_each_run_its_state_progress_and_score(visitor: Visitor):
    page = visitor.go("#/runs")
    row = page.locator("table.runs tbody tr", has_text="second")
    expect(row.locator(".state")).to_have_text("✓done")
    expect(row.locator(".progress")).to_have_text("30/30")
    expect(row).to_contain_text("0.58")  # 0.02 * 29
    assert row.locator(".spark path").get_attribute("d").count("L") == 29


def test_the_list_is_walked_and_opened_with_keys(visitor: Visitor):
    page = visitor.go("#/runs")
    visitor.press("j")
    expect(page.locator("tr.at .name")).to_contain_text("first")
    visitor.press("Enter")
    page.wait_for_selector("h1:text-is('first')")


def test_a_run_is_shown_with_what_it_was_made_from(visitor: Visitor):
    page = visitor.go("#/runs")
    expect(page.locator(".lineage .title")).to_have_text(["second", "sft", "tiny-bytes"])
    assert page.locator(".lineage .arrow").count() == 2


def test_marked_runs_are_compared_in_one_chart(visitor: Visitor):
    page = visitor.go("#/runs")
    visitor.press("x", "j", "x", "c")
    page.wait_for_selector(".chart[data-metric='score'] canvas")
    expect(page.locator(".chip")).to_have_text(["second", "first×"])
    expect(page.locator(".chart[data-metric='score'] .readout span")).to_have_text(["0.58", "0.29"])


def test_curves_stand_under_the_question_they_answer(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    expect(page.locator(".question > summary h2")).to_have_text(
        ["Is it learning?", "Is it still near the start?", "Do sampler and trainer agree?", "Recipe", "Software"]
    )
    near = page.locator("details.question", has_text="Is it still near the start?")
    expect(near.locator(".chart h3")).to_have_text(["KL to the reference", "Entropy"])
    words = page.locator(".chart[data-metric='score'] .plot").get_attribute("aria-label")
    assert words == "Score of first: 0 at step 0, 0.29 at step 29, between 0 and 0.29"


def test_opening_a_run_asks_for_its_curves_once(visitor: Visitor, served: Served):
    visitor.go("#/runs")
    asked: list[str] = []
    visitor.page.on("request", lambda request: asked.append(request.url))
    page = visitor.go(f"#/run/{served.run_id('first')}")
    expect(page.locator(".doctor .verdict")).to_be_visible()
    page.wait_for_load_state("networkidle")
    assert sum("/metrics?" in url for url in asked) == 1


def test_a_question_that_was_shut_draws_what_came_meanwhile_when_it_is_opened(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    near = page.locator("details.question", has_text="Is it still near the start?")
    near.locator("> summary").click()
    expect(near.locator(".chart").first).to_be_hidden()
    with page.expect_response("**/metrics?**"):
        near.locator("> summary").click()
    expect(near.locator(".chart canvas").first).to_be_visible()


def test_pages_open_with_modules_that_were_loaded_before(visitor: Visitor, served: Served):
    page = visitor.go("#/runs")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("performance.getEntriesByName(new URL('/js/token_text.js', location).href).length")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    visitor.go(f"#/run/{served.run_id('first')}/tokens")
    assert asked and not [url for url in asked if url.endswith(".js")]


def test_zoom_and_smoothing_have_keys(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    whole = page.locator("button", has_text="Whole run")
    expect(whole).to_be_hidden()
    visitor.press("+", "s")
    expect(whole).to_be_visible()
    assert float(page.locator("input[aria-label=Smoothing]").input_value()) == pytest.approx(0.1)
    visitor.press("0")
    expect(whole).to_be_hidden()


def test_a_chart_is_saved_as_a_picture_and_as_a_table(visitor: Visitor, served: Served, tmp_path):
    page = visitor.go(f"#/run/{served.run_id('first')}")
    chart = page.locator(".chart[data-metric='kl_ref_k3']")
    with page.expect_download() as picture:
        chart.get_by_text("PNG").click()
    picture.value.save_as(tmp_path / "kl.png")
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as table:
        chart.get_by_text("CSV").click()
    table.value.save_as(tmp_path / "kl.csv")
    assert (tmp_path / "kl.csv").read_text().splitlines()[:3] == ["run,step,value", '"first",0,0', '"first",1,0.1']


def test_a_new_run_appears_and_its_steps_arrive_while_one_looks(visitor: Visitor, served: Served):
    page = visitor.go("#/runs")
    recorder = start_run(served.workspace, "live", steps=50)
    try:
        record_steps(recorder, range(3))
        expect(page.locator("table.runs tbody tr", has_text="live").locator(".progress")).to_have_text("3/50")
        page = visitor.go(f"#/run/{served.run_id('live')}")
        expect(page.locator("#connection")).to_have_text("live")
        record_steps(recorder, [3, 4])
        expect(page.locator(".chart[data-metric='score'] .plot")).to_have_attribute(
            "aria-label", "Score of live: 0 at step 0, 0.04 at step 4, between 0 and 0.04"
        )
        recorder.event("skipped", "an update was left out", step=4)
        expect(page.locator(".events li").first).to_contain_text("an update was left out")
    finally:
        recorder.close("stopped")
    expect(page.locator(".head .state")).to_contain_text("stopped")


# -- token microscope ----------------------------------------------------------------------------------------------


def test_each_token_is_coloured_by_its_advantage_and_clipped_ones_are_marked(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20&row=0")
    tokens = page.locator(".tokens .t")
    expect(tokens).to_have_text(["say up:", "u", "p", "2", "0"])  # its advantages are -1/5, 2/5, -3/5, 4/5
    expect(tokens.nth(0)).to_have_class("t off")
    expect(tokens.nth(4)).to_have_class("t p8")
    expect(tokens.nth(3)).to_have_class("t n6 clipped")  # 3/5 of 4/5 is six eighths


def test_arrow_keys_walk_the_tokens_and_show_all_numbers(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20&row=0")
    visitor.press("ArrowRight", "ArrowRight")
    numbers = page.locator(".numbers > div")
    shown = dict(zip(numbers.locator("dt").all_text_contents(), numbers.locator("dd").all_text_contents(), strict=True))
    assert shown["token 2"] == "p"
    assert shown["advantage"] == "0.4000"
    assert shown["KL"] == "0.2000"  # -0.2 - -0.4
    assert shown["ratio"] == "1.4000"
    assert shown["clipped"] == "no"
    assert shown["entropy"] == "1.0000"


def test_a_token_shows_what_else_might_have_been_said(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20&row=0")
    visitor.press("ArrowRight")
    expect(page.locator(".top_logprobs dd span")).to_have_text(["␣yes37 %", "\\n5.0 %"])  # e^-1 and e^-3


def test_tokens_are_coloured_by_entropy(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20&row=0")
    page.locator("[aria-label='Colour by'] button", has_text="Entropy").click()
    expect(page.locator(".tokens .t").nth(4)).to_have_class("t p8")  # 2 nats, the most there are
    expect(page.locator(".tokens .t").nth(1)).to_have_class("t p2")


def test_a_run_that_recorded_neither_still_opens(visitor: Visitor, served: Served):
    recorder = start_run(served.workspace, "old", steps=1)
    plain = a_rollout(0, 0, "say:", ["a", "b"], 1.0, top_logprobs=None)
    columns = {name: column for name, column in plain.columns.items() if name != "entropy"}
    recorder.record(0, {"score": 1.0}, [replace(plain, columns=columns)])
    recorder.close("done")
    page = visitor.go(f"#/run/{served.run_id('old')}/tokens?step=0&row=0")
    visitor.press("ArrowRight")
    expect(page.locator(".numbers .piece dd")).to_have_text("a")
    expect(page.locator(".top_logprobs")).to_have_count(0)
    expect(page.locator("[aria-label='Colour by'] button", has_text="Entropy")).to_have_count(0)


def test_the_same_prompt_is_followed_through_training_with_a_key(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20&row=1")
    visitor.press("[")
    page.wait_for_selector("#page[data-shown='19/1']")
    expect(page.locator(".tokens .t").first).to_have_text("say down:")


def test_answers_are_searched_and_sorted(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20")
    page.get_by_label("Sort by").select_option("score")
    expect(page.locator(".answers .answer-text")).to_have_text(["side↵20", "down20", "up20"])
    visitor.press("/")
    page.keyboard.type("down")
    expect(page.locator(".answers .answer-text")).to_have_text(["down20"])


def test_two_runs_stand_side_by_side_on_one_prompt(visitor: Visitor, served: Served):
    first, second = served.run_id("first"), served.run_id("second")
    page = visitor.go(f"#/run/{first}/tokens?step=10&row=0&beside={second}")
    expect(page.locator(".lens-head > b")).to_have_text(["first", "second"])
    expect(page.locator(".lens").nth(1).locator(".t").first).to_have_text("say up:")


def test_another_quantity_is_chosen_with_a_key(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('first')}/tokens?step=20&row=0")
    visitor.press("q")
    expect(page.locator("[aria-label='Colour by'] [aria-pressed=true]")).to_have_text("Value")
