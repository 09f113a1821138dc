"""Pictures of every page: `python tests/studio/make_pictures.py WORKSPACE FOLDER [--all]`.

WORKSPACE has two or more runs with models. Queues, votes, notes and a few more runs are added to a copy of it. Without
`--all` only the few are taken that docs/studio holds; with it every page, full and empty, wide and narrow, light and
dark.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from studio_browser import Served, Visitor, a_browser, record_steps, serving, start_run

from tether.store.database.open import workspace_at
from tether.store.database.records import RecordSource

WIDE = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 1}
GUIDELINES = "Prefer the answer that does what was asked. If both do, prefer the shorter one."
IN_DOCS = {
    "": ("runs", "run", "run-compared", "run-notes", "tokens", "label-queues", "label", "train", "arena", "chat"),
    "-dark": ("run",),
    "-phone": ("runs",),
}
COLOURS = 128  # of a picture in the docs: its file is half the size
LOOKS = {
    "": {**WIDE, "color_scheme": "light"},
    "-dark": {**WIDE, "color_scheme": "dark"},
    "-phone": {**PHONE, "color_scheme": "light"},
    "-phone-dark": {**PHONE, "color_scheme": "dark"},
}


def main(workspace: Path, target: Path, *, everything: bool) -> None:
    """Take them all."""
    target.mkdir(parents=True, exist_ok=True)
    with a_browser() as browser:
        with copied(workspace) as served:
            queues = add_queues(served)
            with more_runs(served):
                pages = full_pages(served, queues)
                for ending, size in LOOKS.items():
                    names = pages if everything else IN_DOCS.get(ending, ())
                    take(browser, served, {name: pages[name] for name in names}, target, size, ending)
        if everything:
            with tempfile.TemporaryDirectory() as folder, serving(workspace_at(Path(folder) / "runs", None)) as served:
                for ending, size in LOOKS.items():
                    take(browser, served, EMPTY_PAGES, target, size, ending)
        else:
            make_small(target)


def make_small(target: Path) -> None:
    """Few colours are enough for a page of text and lines."""
    from PIL import Image

    for path in target.glob("*.png"):
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(COLOURS)
        small.save(path, optimize=True)


@contextmanager
def copied(workspace: Path) -> Iterator[Served]:
    """A server over a copy of the workspace."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(workspace, Path(folder) / "runs")
        with serving(workspace_at(Path(folder) / "runs", None)) as served:
            yield served


@contextmanager
def more_runs(served: Served) -> Iterator[None]:
    """Runs that are under way, failed and just begun, with notes; two of them in the group of a run that is there."""
    sources = [RecordSource("model", "runs/sft/model", run="sft")]
    like = next(run for run in served.api("GET", "runs")["runs"] if run["method"] == "ppo")
    config = served.api("GET", f"runs/{like['id']}")["config"]
    other = config | {"kl": config["kl"] | {"coef": 0.2}, "run": config["run"] | {"seed": 1}}
    finished = start_run(served.workspace, "sweep/kl-0.2", steps=30, sources=sources, config=other)
    record_steps(finished, range(30), score=0.02)
    finished.close("done")
    failed = start_run(served.workspace, "sweep/kl-0", steps=30, sources=sources)
    record_steps(failed, range(9), score=0.005)
    failed.event("failed", "the KL to the reference was not finite", step=8)
    failed.close("failed")
    running = start_run(served.workspace, "long-run", steps=200, sources=sources)
    record_steps(running, range(40), score=0.004)
    waiting = start_run(served.workspace, "just-started", steps=100, sources=sources)
    said = {
        "sweep/kl-0.2": {"group": "kl sweep", "tags": ["kl"], "note": "Stays closer to the start, and learns as fast."},
        "sweep/kl-0": {"group": "kl sweep", "tags": ["kl", "broken"], "note": "Without a KL it leaves the language."},
        "long-run": {"tags": ["nightly"]},
    }
    for name, notes in said.items():
        served.api("POST", f"runs/{served.run_id(name)}/notes", json=notes)
    yield
    for recorder in (running, waiting):
        recorder.close("stopped")


def add_queues(served: Served) -> dict[str, int]:
    """A queue of each kind, an arena, and some votes."""
    runs = served.api("GET", "runs")["runs"]
    run = next(each["id"] for each in runs if each["method"] == "ppo")
    answers = {"from": "run", "run": run, "count": 24}
    made = {
        kind: served.api("POST", "label/queues", json={"name": name, "kind": kind, "guidelines": GUIDELINES})["id"]
        for kind, name in (("pair", "Which case?"), ("ranking", "Best first"), ("demonstration", "Write the answer"))
    }
    for kind, queue in made.items():
        served.api("POST", f"label/queues/{queue}/fill", json=answers)
        for _ in range(9 if kind == "pair" else 0):
            vote(served, queue)
    others = [one["id"] for one in runs if one["method"] != "reward"][:2]
    arena = {"run_a": others[0], "run_b": others[1], "prompts": [{"prompt": f"{n} lower:"} for n in range(6)]}
    made["arena"] = served.api("POST", "arena", json=arena | {"name": "Two policies"})["queue_id"]
    for _ in range(5):
        vote(served, made["arena"])
    return made


def vote(served: Served, queue: int) -> None:
    """The left answer is better, or else the right one."""
    item = served.api("GET", f"label/queues/{queue}/next")["item"]
    choice = ("left", "right", "left", "tie")[item["id"] % 4]
    body = {"client_uid": f"picture-{item['id']}", "item_id": item["id"], "order": item["order"], "choice": choice}
    served.api("POST", "label/votes", json=body)


def full_pages(served: Served, queues: dict[str, int]) -> dict[str, str]:
    """Every page with something on it."""
    runs = {run["name"]: run for run in served.api("GET", "runs")["runs"]}
    first = next(run for run in runs.values() if run["method"] == "ppo" and run["name"] not in ADDED)
    kept = served.api("GET", f"runs/{first['id']}")["rollout_steps"]
    return {
        "runs": "#/runs",
        "runs-none-fits": "#/runs?tag=none",
        "run": f"#/run/{first['id']}",
        "run-notes": f"#/run/{first['id']}",
        "run-compared": f"#/run/{first['id']}?with={runs['sweep/kl-0.2']['id']}",
        "run-running": f"#/run/{runs['long-run']['id']}",
        "run-empty": f"#/run/{runs['just-started']['id']}",
        "tokens": f"#/run/{first['id']}/tokens?step={kept[len(kept) // 3]}&row=0",
        "tokens-empty": f"#/run/{runs['just-started']['id']}/tokens",
        "label-queues": "#/label",
        "label": f"#/label/{queues['pair']}",
        "label-ranking": f"#/label/{queues['ranking']}",
        "label-demonstration": f"#/label/{queues['demonstration']}",
        "train": "#/train",
        "train-ask": "#/train",
        "train-error": "#/train",
        "arena": "#/arena",
        "chat": f"#/chat?run={runs['sft']['id']}",
        "start": "#/start",
        "keys": "#/runs",
        "no-such-page": "#/nowhere",
    }


ADDED = ("sweep/kl-0.2", "sweep/kl-0", "long-run", "just-started")
EMPTY_PAGES = {f"{name}-empty": f"#/{name}" for name in ("runs", "label", "train", "arena", "chat", "start")}


def take(browser: Any, served: Served, pages: dict[str, str], target: Path, size: dict[str, Any], ending: str) -> None:
    """One picture a page, in one look."""
    if not pages:
        return
    visitor = Visitor(browser, served, **size)
    for name, address in pages.items():
        page = visitor.go("#/nowhere" if address == "#/runs" else "#/runs")
        page = visitor.go(address)
        if name == "tokens":
            visitor.press("ArrowRight", "ArrowRight")
            page.wait_for_selector(".top_logprobs")
        if name == "chat":
            page.get_by_label("Message").fill("4 lower:")
            visitor.press("Enter")
            page.wait_for_selector("[aria-busy=false] .heard")
        if name == "run-notes":
            visitor.press("e")
        if name.startswith("train-"):
            visitor.press("t")
        if name == "train-error":
            page.get_by_label("Steps of PPO").evaluate("field => { field.type = 'text'; field.value = '1e9'; }")
            page.locator("dialog button.main").click()
            page.wait_for_selector(".dialog-error")
            visitor.faults.clear()  # the browser tells of the refusal, which is what is pictured
        if name == "keys":
            visitor.press("?")
        page.wait_for_timeout(400)
        page.screenshot(path=target / f"{name}{ending}.png")
    assert visitor.faults == [], visitor.faults
    visitor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), everything="--all" in sys.argv)
