"""Entering by a link, and putting people out, in a browser."""

from collections.abc import Iterator

import httpx
import pytest
from studio_browser import OWNER_TOKEN, Served, Visitor, expect, serving, small_workspace


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(small_workspace(tmp_path_factory.mktemp("studio"))) as found:
        yield found


def test_a_link_is_one_click_and_its_token_leaves_the_address(visitor: Visitor, served: Served):
    sent = []
    visitor.page.on("request", lambda request: sent.append(request.url))
    visitor.page.goto("about:blank")  # first, so that the page before asks nothing without its cookie
    visitor.context.clear_cookies()
    visitor.entering = True
    visitor.page.goto(f"{served.address}/#token={OWNER_TOKEN}")
    expect(visitor.page.locator("#nav a").first).to_be_visible()
    assert "token" not in visitor.page.url and not any(OWNER_TOKEN in url for url in sent)
    visitor.page.go_back()
    assert OWNER_TOKEN not in visitor.page.url
    [cookie] = visitor.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"


def test_a_wrong_link_is_told_and_a_token_can_be_given(browser, served: Served):
    page = browser.new_page()
    page.goto(f"{served.address}/#token=wrong")
    expect(page.locator("#reason")).to_contain_text("not known")
    page.fill("input[name=token]", OWNER_TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#nav a").first).to_be_visible()
    page.context.close()


def test_a_person_is_revoked_with_a_button_and_their_page_says_so(visitor: Visitor, browser, served: Served):
    queue = served.api("POST", "label/queues", json={"name": "one"})["id"]
    records = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
    served.api("POST", f"label/queues/{queue}/fill", json={"from": "file", "records": records})
    token = served.api("POST", "raters", json={"name": "ann", "queue_id": queue})["token"]
    ann = Visitor(browser, served, token=token)
    ann.go(f"#/label/{queue}")
    page = visitor.go("#/label")
    session = page.locator(".sessions li", has_text="ann")
    expect(session).to_have_count(1)
    line = page.locator(".people li", has_text="ann")
    line.get_by_role("button", name="Revoke").click()
    expect(line).to_contain_text("link revoked")
    expect(session).to_have_count(0)
    headers = {"authorization": f"Bearer {token}"}
    assert httpx.get(f"{served.address}/api/me", headers=headers, timeout=20).status_code == 401
    ann.page.reload()
    expect(ann.page.locator("#enter")).to_be_visible()
    ann.close()
    line.get_by_role("button", name="New link").click()
    expect(line.locator("output")).to_contain_text("/#token=")


def test_a_session_is_ended_with_a_button(visitor: Visitor, browser, served: Served):
    other = Visitor(browser, served)
    page = visitor.go("#/label")
    own = page.locator(".sessions li", has_text="this browser")
    expect(own).to_have_count(1)
    others = page.locator(".sessions li", has_text="used")
    before = others.count()
    assert before >= 1
    for _ in range(before):
        count = others.count()
        others.first.get_by_role("button", name="End").click()
        expect(others).to_have_count(count - 1)
    other.page.reload()
    expect(other.page.locator("#enter")).to_be_visible()
    other.close()
    expect(own).to_have_count(1)


@pytest.mark.parametrize(("agrees", "first"), [(False, "Runs"), (True, "Label")])
def test_a_link_to_another_person_asks_first(browser, served: Served, agrees: bool, first: str):
    """Also from a page of another site, where the first request has no cookie."""
    token = served.api("POST", "raters", json={"name": "mallory"})["token"]
    page, asked = browser.new_page(), []

    def answer(dialog) -> None:
        asked.append(dialog.message)
        if agrees:
            dialog.accept()
        else:
            dialog.dismiss()

    page.on("dialog", answer)
    page.goto(f"{served.address}/#token={OWNER_TOKEN}")
    expect(page.locator("#nav a").first).to_have_text("Runs")
    link = f"<a href='{served.address}/#token={token}'>see this</a>"
    elsewhere = "http://localhost:1/"
    page.route(elsewhere, lambda route: route.fulfill(body=link, content_type="text/html"))
    page.goto(elsewhere)
    with page.expect_event("dialog"):
        page.get_by_role("link", name="see this").click()
    expect(page.locator("#nav a").first).to_have_text(first)
    assert len(asked) == 1 and "is logged in as owner" in asked[0]
    page.context.close()
