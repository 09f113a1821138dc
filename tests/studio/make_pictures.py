"""Pictures of every page for docs/studio: `python tests/studio/make_pictures.py WORKSPACE docs/studio`.

The workspace has runs already; queues and votes are added to a copy of it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from studio_browser import Served, Visitor, a_browser, serving

from tether.runs.store.open import workspace_at

WIDE = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
GUIDELINES = "Prefer the answer that does what was asked. If both do, prefer the shorter one."


def main(workspace: Path, target: Path) -> None:
    """Take them all."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(workspace, Path(folder) / "runs")
        with serving(workspace_at(Path(folder) / "runs", None)) as served, a_browser() as browser:
            queues = add_queues(served)
            for theme, ending in (("light", ""), ("dark", "-dark")):
                take(browser, served, queues, target, {**WIDE, "color_scheme": theme}, ending)
            take(browser, served, queues, target, PHONE, "-phone")


def add_queues(served: Served) -> dict[str, int]:
    """A queue of each kind, an arena, and some votes."""
    run = served.api("GET", "runs")["runs"][-1]["id"]
    kept = served.api("GET", f"runs/{run}")["rollout_steps"]
    answers = {"from": "run", "run": run, "count": 24}
    later = served.api("GET", "runs")["runs"][-2]["id"]
    made = {
        kind: served.api("POST", "label/queues", json={"name": name, "kind": kind, "guidelines": GUIDELINES})["id"]
        for kind, name in (("pair", "Which case?"), ("ranking", "Best first"), ("demonstration", "Write the answer"))
    }
    for kind, queue in made.items():
        body = answers | ({"step": kept[len(kept) // 2], "other_run": later} if kind == "pair" else {})
        served.api("POST", f"label/queues/{queue}/fill", json=body)
        for _ in range(9 if kind == "pair" else 0):
            vote(served, queue)
    others = [one["id"] for one in served.api("GET", "runs")["runs"][:2]]
    arena = {"run_a": others[0], "run_b": others[1], "count": 12, "name": "Two policies"}
    made["arena"] = served.api("POST", "arena", json=arena)["queue_id"]
    for _ in range(8):
        vote(served, made["arena"])
    return made


def vote(served: Served, queue: int) -> None:
    """The left answer is better, or else the right one."""
    item = served.api("GET", f"label/queues/{queue}/next")["item"]
    choice = ("left", "right", "left", "tie")[item["id"] % 4]
    body = {"client_uid": f"picture-{item['id']}", "item_id": item["id"], "order": item["order"], "choice": choice}
    served.api("POST", "label/votes", json=body)


def take(browser: Any, served: Served, queues: dict[str, int], target: Path, size: dict, ending: str) -> None:
    """One picture a page."""
    visitor = Visitor(browser, served, **size)
    runs = {run["name"]: run for run in served.api("GET", "runs")["runs"]}
    first = list(runs.values())[-1]
    kept = served.api("GET", f"runs/{first['id']}")["rollout_steps"]
    step = kept[len(kept) // 3]
    pages = {
        "runs": "#/runs",
        "run": f"#/run/{first['id']}",
        "tokens": f"#/run/{first['id']}/tokens?step={step}&row=0",
        "label-queues": "#/label",
        "label": f"#/label/{queues['pair']}",
        "label-ranking": f"#/label/{queues['ranking']}",
        "train": "#/train",
        "arena": "#/arena",
        "chat": "#/chat",
        "start": "#/start",
    }
    for name, address in pages.items():
        page = visitor.go(address)
        if name == "tokens":
            visitor.press("ArrowRight", "ArrowRight")
            page.wait_for_selector(".alternatives")
        if name == "chat":
            page.keyboard.type("4 lower:")
            visitor.press("Enter")
            page.wait_for_selector("[aria-busy=false] .heard")
        page.wait_for_timeout(1500)
        page.screenshot(path=target / f"{name}{ending}.png")
    if not ending:
        visitor.go("#/runs")
        visitor.press("?")
        visitor.page.screenshot(path=target / "keys.png")
    assert visitor.faults == [], visitor.faults
    visitor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
