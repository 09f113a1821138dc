"""Label: every decision is one key, and what was pressed is what the database holds."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from studio_browser import Served, Visitor, expect, serving, small_workspace

PAIRS = [{"prompt": f"question {place}", "chosen": f"good {place}", "rejected": f"bad {place}"} for place in range(4)]


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    with serving(small_workspace(tmp_path)) as found:
        yield found


def queue_with(served: Served, kind: str, records: list[dict]) -> int:
    made = served.api("POST", "label/queues", json={"name": f"a {kind}", "kind": kind, "guidelines": "Be fair."})["id"]
    served.api("POST", f"label/queues/{made}/fill", json={"from": "file", "records": records})
    return made


def stored_votes(served: Served) -> list[tuple]:
    with closing(sqlite3.connect(served.workspace.directory / "tether.db")) as store:
        asked = 'select "order", choice from votes where not undone order by id'
        return store.execute(asked).fetchall()


def wait_for_item(visitor: Visitor, before: str | None) -> str:
    """The item that is shown once it is another one."""
    page = visitor.page
    other = f":not([data-item='{before}'])" if before else ""
    page.wait_for_selector(f"#page[data-item]{other}")
    return page.locator("#page").get_attribute("data-item")


def vote(visitor: Visitor, key: str) -> None:
    before = visitor.page.locator("#page").get_attribute("data-item")
    visitor.press(key)
    wait_for_item(visitor, before)


def test_one_key_decides_a_pair_and_the_shown_order_is_kept_with_it(visitor: Visitor, served: Served):
    queue = queue_with(served, "pair", PAIRS)
    page = visitor.go(f"#/label/{queue}")
    shown = [page.locator(".side .text").all_text_contents()]
    for key in ("ArrowLeft", "2", "t"):
        vote(visitor, key)
        shown.append(page.locator(".side .text").all_text_contents())
    vote(visitor, "b")
    expect(page.locator(".task")).to_contain_text("All done")
    kept = [(numbers(order), choice.strip('"')) for order, choice in stored_votes(served)]
    assert [choice for _, choice in kept] == ["left", "right", "tie", "both_bad"]
    for place, (order, _) in enumerate(kept):
        assert shown[place] == [[f"good {place}", f"bad {place}"][which] for which in order]


def numbers(text: str) -> list[int]:
    return json.loads(text)


def test_undo_brings_the_item_back(visitor: Visitor, served: Served):
    page = visitor.go(f"#/label/{queue_with(served, 'pair', PAIRS)}")
    first = page.locator("#page").get_attribute("data-item")
    vote(visitor, "1")
    assert len(stored_votes(served)) == 1
    vote(visitor, "u")
    assert page.locator("#page").get_attribute("data-item") == first
    assert stored_votes(served) == []


def test_a_ranking_is_made_with_the_number_keys(visitor: Visitor, served: Served):
    queue = queue_with(served, "ranking", [{"prompt": "order these", "answers": ["a", "b", "c", "d"]}])
    page = visitor.go(f"#/label/{queue}")
    shown = page.locator(".ranking .text").all_text_contents()
    visitor.press("3", "1", "4")  # the one that is left is the last
    expect(page.locator(".ranking .text")).to_have_text([shown[2], shown[0], shown[3], shown[1]])
    vote(visitor, "Enter")
    [(_, choice)] = stored_votes(served)
    assert numbers(choice) == [2, 0, 3, 1]


def test_a_ranking_is_made_by_dragging(visitor: Visitor, served: Served):
    queue = queue_with(served, "ranking", [{"prompt": "order these", "answers": ["a", "b", "c", "d"]}])
    page = visitor.go(f"#/label/{queue}")
    shown = page.locator(".ranking .text").all_text_contents()
    rows = page.locator(".ranking li")
    rows.nth(3).drag_to(rows.nth(0))
    expect(page.locator(".ranking .text")).to_have_text([shown[3], shown[0], shown[1], shown[2]])


def test_a_ranking_is_made_with_a_finger(browser, served: Served):
    queue = queue_with(served, "ranking", [{"prompt": "order these", "answers": ["a", "b", "c", "d"]}])
    phone = Visitor(browser, served, has_touch=True, viewport={"width": 390, "height": 844})
    page = phone.go(f"#/label/{queue}")
    shown = page.locator(".ranking .text").all_text_contents()
    start, end = (page.locator(".ranking .handle").nth(place).bounding_box() for place in (3, 0))
    touch = phone.context.new_cdp_session(page)

    def finger(kind: str, *boxes: dict) -> None:
        points = [{"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2} for box in boxes]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    finger("touchStart", start)
    finger("touchMove", {**start, "y": (start["y"] + end["y"]) / 2})
    finger("touchMove", end)
    finger("touchEnd")
    expect(page.locator(".ranking .text")).to_have_text([shown[3], shown[0], shown[1], shown[2]])
    assert phone.faults == []
    phone.close()


def test_a_demonstration_is_written_and_saved_from_the_keyboard(visitor: Visitor, served: Served):
    visitor.go(f"#/label/{queue_with(served, 'demonstration', [{'prompt': 'say hello'}, {'prompt': 'say bye'}])}")
    visitor.page.keyboard.type("hello s t u")  # letters that are keys elsewhere
    vote(visitor, "Control+Enter")
    [(_, choice)] = stored_votes(served)
    assert choice == '"hello s t u"'


def test_a_queue_is_made_and_filled_from_runs_on_the_page(visitor: Visitor, served: Served):
    page = visitor.go("#/label")
    visitor.press("n")
    page.keyboard.type("from runs")
    page.keyboard.press("Enter")
    page.locator(".queue", has_text="from runs").get_by_text("Fill", exact=True).click()
    page.get_by_label("How many").fill("6")
    page.get_by_label("Share asked twice").fill("0")
    page.get_by_role("button", name="Fill").last.click()
    expect(page.locator(".queue", has_text="from runs")).to_contain_text("6 items")


def test_an_annotator_sees_nothing_but_the_queue(browser, served: Served):
    queue = queue_with(served, "pair", PAIRS)
    token = served.api("POST", "raters", json={"name": "ann", "role": "annotator", "queue_id": queue})["token"]
    ann = Visitor(browser, served, token=token)
    ann.page.wait_for_selector(".side")
    expect(ann.page.locator("#nav a")).to_have_text(["Label"])
    vote(ann, "ArrowRight")
    assert len(stored_votes(served)) == 1
    assert ann.faults == []
    ann.page.goto(f"{served.address}/#/runs")
    expect(ann.page.locator("#page")).to_contain_text("could not be opened")
    ann.close()


def test_a_vote_is_sent_again_until_the_server_takes_it(visitor: Visitor, served: Served):
    page = visitor.go(f"#/label/{queue_with(served, 'pair', PAIRS)}")
    refused: list[str] = []

    def first_time_away(route):
        refused.append(route.request.post_data)
        route.abort() if len(refused) == 1 else route.continue_()

    page.route("**/api/label/votes", first_time_away)
    vote(visitor, "1")
    assert len(refused) == 2
    assert refused[0] == refused[1]  # the same client_uid, so that it counts once
    assert len(stored_votes(served)) == 1
    visitor.faults.clear()  # the browser notes the request that was cut


def test_an_owner_finds_assigns_and_marks_items_with_the_keyboard(visitor: Visitor, served: Served):
    queue = queue_with(served, "pair", PAIRS)
    ann = served.api("POST", "raters", json={"name": "ann", "role": "annotator", "queue_id": queue})["id"]
    page = visitor.go(f"#/label/{queue}/items")
    expect(page.locator(".item")).to_have_count(4)
    visitor.press("/")
    page.keyboard.type("GOOD 2")
    expect(page.locator(".item .excerpt")).to_have_text(["question 2"])
    visitor.press("Escape")
    visitor.press("Enter")
    expect(page.locator(".item-answers .text")).to_have_text(["good 2", "bad 2"])
    visitor.press("x", "a")
    expect(page.get_by_role("checkbox", name="owner")).to_be_focused()
    visitor.press("Tab", "Space", "Enter")  # ann
    expect(page.locator(".item-facts")).to_contain_text("for ann")
    visitor.press("o")
    expect(page.locator("dialog")).to_have_count(1)
    visitor.press("Enter")
    expect(page.locator(".badge.gold")).to_have_count(1)
    visitor.press("t")
    expect(page.get_by_label("Tags, separated by commas")).to_be_focused()
    page.keyboard.type("hard, odd")
    visitor.press("Enter")
    expect(page.locator(".badge", has_text="hard")).to_have_count(1)
    [row] = served.api("GET", f"label/queues/{queue}/items?text=good 2")["items"]
    assert (row["assigned"], row["gold"], row["tags"]) == ([ann], [0, 1], ["hard", "odd"])
    assert [one["assigned"] for one in served.api("GET", f"label/queues/{queue}/items?gold=no")["items"]] == [[]] * 3


MARKDOWN = {
    "**bold** and _it_ and snake_case_name": "<p><strong>bold</strong> and <em>it</em> and snake_case_name</p>",
    "<b>x</b> & `<i>`": "<p>&lt;b&gt;x&lt;/b&gt; &amp; <code>&lt;i&gt;</code></p>",
    "[a](javascript:alert(1))": '<p><span class="md-link">a <small>javascript:alert(1</small></span>)</p>',
    "![a](http://evil.invalid/x)": '<p><span class="md-image">image: a <small>http://evil.invalid/x</small></span></p>',
    "1. a\n2. b\n   - c": "<ol><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ol>",
    "3 * 4 * 5 ** 2": "<p>3 * 4 * 5 ** 2</p>",
    "`open": "<p>`open</p>",
}


def test_markdown_is_made_of_text_alone(visitor: Visitor, served: Served):
    page = visitor.go("#/label")
    script = """async (text) => {
      const { markdown } = await import("/js/markdown.js");
      const box = document.createElement("div");
      box.append(...markdown(text));
      return box.innerHTML;
    }"""
    for text, made in MARKDOWN.items():
        assert page.evaluate(script, text) == made
    long = ["[" * 29_000, "*a " * 9_000, "> " * 9_000, "- " * 9_000, "`" * 29_000, "|" * 29_000, "_a" * 14_000]
    for text in long:
        seconds = page.evaluate(
            f"async (text) => {{ const t = performance.now(); await ({script})(text); return performance.now() - t; }}",
            text,
        )
        assert seconds < 30_000, f"{text[:6]} took {seconds} ms"
