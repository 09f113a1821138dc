"""The whole loop with the keyboard alone: judge pairs, train on the votes, see the curve, open a token, talk to it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from studio_browser import Served, Visitor, a_browser, expect, serving

from tether.store.database.open import workspace_at

PAIRS = 20
MINUTES = 4 * 60_000  # the longest that the two trainings may take, on a machine with other work


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    with serving(workspace_at(tmp_path / "runs", None)) as found:
        yield found


@pytest.fixture
def visitor(served: Served) -> Iterator[Visitor]:
    with a_browser() as browser:
        found = Visitor(browser, served)
        yield found
        faults = found.faults
        found.close()
        assert not faults, faults


def fill_in(visitor: Visitor, label: str, value: str) -> None:
    """Tab until the field is reached, and type over what is there."""
    page = visitor.page
    for _ in range(12):
        if page.evaluate("document.activeElement.labels?.[0]?.querySelector('.field-name')?.textContent") == label:
            break
        visitor.press("Tab")
    visitor.press("Control+a")
    page.keyboard.type(value)


def test_votes_become_a_reward_model_and_a_policy_that_can_be_talked_to(visitor: Visitor, served: Served):
    queue = served.api("POST", "label/queues", json={"name": "case", "kind": "pair"})["id"]
    records = [{"prompt": f"{place} lower:", "chosen": "abcd", "rejected": "ABCD"} for place in range(PAIRS)]
    served.api("POST", f"label/queues/{queue}/fill", json={"from": "file", "records": records})

    page = visitor.go(f"#/label/{queue}")
    for _ in range(PAIRS):
        item = page.locator("#page").get_attribute("data-item")
        left = page.locator(".side .text").first.text_content() or ""
        visitor.press("ArrowLeft" if left.islower() else "ArrowRight")
        page.wait_for_selector(f"#page:not([data-item='{item}'])")
    expect(page.locator(".task")).to_contain_text("All done")

    visitor.press("g", "t")
    expect(page.locator(".latest dd").first).to_have_text(str(PAIRS))
    visitor.press("t")
    fill_in(visitor, "Steps of the reward model", "6")
    fill_in(visitor, "Steps of PPO", "3")
    visitor.press("Enter")
    expect(page.locator(".jobs .state.done").first).to_be_visible(timeout=MINUTES)
    expect(page.locator(".latest dd").first).to_have_text("0")
    expect(page.locator(".chart .readout")).to_have_text(
        "1"
    )  # every pair that was kept aside is ranked as it was judged

    visitor.press("g", "r")
    expect(page.locator("table.runs tbody tr")).to_have_count(2)
    visitor.press("Enter")
    words = page.locator(".chart[data-metric='score'] .plot")
    expect(words).to_have_attribute("aria-label", re.compile("at step 2,"))
    visitor.press("m")
    page.wait_for_selector(".tokens .t")
    visitor.press("ArrowRight")
    expect(page.locator(".numbers")).to_contain_text("advantage")

    visitor.press("g", "c")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("4 lower:")
    visitor.press("Enter")
    expect(page.locator(".heard .text")).not_to_have_text("…", timeout=60_000)


@pytest.mark.parametrize("label", ["Steps of the reward model", "Steps of PPO"])
def test_an_error_of_the_train_dialog_names_the_field_as_the_page_does(visitor: Visitor, served: Served, label: str):
    queue = served.api("POST", "label/queues", json={"name": "steps", "kind": "pair"})["id"]
    records = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    served.api("POST", f"label/queues/{queue}/fill", json={"from": "file", "records": records})
    item = served.api("GET", f"label/queues/{queue}/next")["item"]
    vote = {"client_uid": f"vote-{queue}", "item_id": item["id"], "order": item["order"], "choice": "left"}
    served.api("POST", "label/votes", json=vote)
    page = visitor.go("#/train")
    page.get_by_role("button", name="Train a reward model, then PPO").first.click()
    page.get_by_label(label).evaluate("field => { field.type = 'text'; field.value = '1e9'; }")
    page.locator("dialog button.main").click()
    told = page.locator(".dialog-error")
    expect(told).to_contain_text(f"{label}: Input should be less than or equal to 1000000")
    expect(told).not_to_contain_text("_steps")
    visitor.faults.clear()  # the browser tells of the refusal
