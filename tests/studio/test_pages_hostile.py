"""Text that a model or a person wrote is only ever text: no script of it runs, and nothing is asked for elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from studio_browser import Served, Visitor, a_rollout, expect, serving, start_run

from tether.store.database.open import workspace_at
from tether.studio.run_routes import message

CODE = "window.hit=1"
ELSEWHERE = "http://evil.invalid/x"
BODIES = [
    f"<script>{CODE}</script>",
    f"<img src=x onerror={CODE}>",
    f"<img src={ELSEWHERE}>",
    f"<svg onload={CODE}>",
    f"<svg><script>{CODE}</script></svg>",
    f"<iframe srcdoc='<script>parent.{CODE}</script>'></iframe>",
    f"<iframe src=javascript:parent.{CODE}></iframe>",
    f"<a href=javascript:{CODE}>x</a>",
    f"<body onload={CODE}>",
    f"<style>@import '{ELSEWHERE}'</style>",
    f"<link rel=stylesheet href={ELSEWHERE}>",
    f"<base href={ELSEWHERE}>",
    f"<form action={ELSEWHERE}><button autofocus onfocus={CODE}>",
    f"<details open ontoggle={CODE}>",
    f"<video><source onerror={CODE}></video>",
    f"<object data={ELSEWHERE}></object>",
    f"<embed src={ELSEWHERE}>",
    f"<meta http-equiv=refresh content='0;url={ELSEWHERE}'>",
    f"<template><img src=x onerror={CODE}></template>",
    f"<math><mtext><img src=x onerror={CODE}></mtext></math>",
    f"${{{CODE}}}",
    f"{{{{constructor.constructor('{CODE}')()}}}}",
    f"javascript:{CODE}",
    "\u202e\u2066reversed",
    "\u0000\u0007\u001b[31m",
]
WRAPPINGS = ["{}", '"{}', "'>{}", "</textarea>{}", "</script>{}", "</title>{}", "--><!--{}-->", "]]>{}", "\\x3c{}"]
HOSTILE = [wrapping.format(body) for wrapping, body in product(WRAPPINGS, BODIES)]
assert len(HOSTILE) >= 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    workspace = workspace_at(tmp_path_factory.mktemp("hostile") / "runs", None)
    recorder = start_run(workspace, "hostile", steps=2)
    rows = [
        a_rollout(0, row, text, [text, "\n", text], float(row), finish=text[:20]) for row, text in enumerate(HOSTILE)
    ]
    recorder.record(0, {"score": 1.0, f"reward/{BODIES[1]}": 0.5}, rows)
    for text in HOSTILE[:60]:
        recorder.event("note", text, step=0)
    recorder.close("done")
    with serving(workspace) as found:
        yield found


@pytest.fixture
def visitor(browser, served: Served) -> Iterator[Visitor]:
    found = Visitor(browser, served)
    yield found
    assert found.page.evaluate("window.hit") is None
    assert found.page.locator("img[src='x'], iframe, object, embed, base, meta[http-equiv]").count() == 0
    faults = [fault for fault in found.faults if "404" not in fault]  # an id with odd signs may not be found
    found.close()
    assert not faults, faults


def test_events_and_names_of_metrics_are_shown_as_text(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('hostile')}")
    expect(page.locator(".events li", has_text=BODIES[0])).not_to_have_count(0)
    expect(page.locator("h3", has_text=BODIES[1])).to_have_count(1)


def test_every_answer_prompt_and_token_is_shown_as_text(visitor: Visitor, served: Served):
    page = visitor.go(f"#/run/{served.run_id('hostile')}/tokens")
    while page.get_by_text("More", exact=True).count():
        before = page.locator(".answers [data-row]").count()
        page.get_by_text("More", exact=True).click()
        expect(page.locator(f".answers li:nth-child({before + 1}) [data-row]")).to_have_count(1)
    assert page.locator(".answers [data-row]").count() == len(HOSTILE)
    for row in range(len(BODIES)):
        page.locator(f".answers [data-row='{row}']").click()
        page.wait_for_selector(f"#page[data-shown='0/{row}']")
        page.locator(".tokens .t").nth(1).click()
    expect(page.locator(".tokens .t")).to_have_count(4)


def test_what_is_to_be_judged_is_shown_as_text(visitor: Visitor, served: Served):
    name = BODIES[1]
    made = served.api("POST", "label/queues", json={"name": name, "kind": "pair", "guidelines": BODIES[0]})["id"]
    records = [{"prompt": text, "chosen": text, "rejected": f"{text}."} for text in BODIES]
    served.api("POST", f"label/queues/{made}/fill", json={"from": "file", "records": records})
    served.api("POST", "raters", json={"name": BODIES[3], "role": "annotator"})
    page = visitor.go("#/label")
    expect(page.locator(".queue-name")).to_have_text(name)
    expect(page.locator(".raters.people")).to_contain_text(BODIES[3])
    page = visitor.go(f"#/label/{made}")
    expect(page.locator(".guidelines")).to_contain_text(BODIES[0])
    for _ in BODIES:
        item = page.locator("#page").get_attribute("data-item")
        visitor.press("1")
        page.wait_for_selector(f"#page:not([data-item='{item}'])")
    expect(page.locator(".task")).to_contain_text("All done")


def spoken(text: str) -> str:
    """An answer as the server streams it: one token, and the end."""
    return message("token", {"text": text}, None) + message("done", {"finish": "stop", "tokens": 1}, None)


def test_what_a_model_says_in_chat_is_shown_as_text(visitor: Visitor, served: Served):
    page = visitor.go("#/chat")
    said = iter(BODIES[:6])
    page.route("**/api/chat", lambda route: route.fulfill(content_type="text/event-stream", body=spoken(next(said))))
    for turn, text in enumerate(BODIES[:6], start=1):
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        expect(page.locator(".heard .text")).to_have_text(BODIES[:turn])
