"""Load times of Studio's heaviest pages in Chromium, until the page responds; for benchmarks/studio.py.

The run page shows 20 curves of 50,000 steps, a million points. The microscope shows an answer of 4,096 tokens. Step to
screen is from `record` in the training process to the number in the chart's label.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "studio"))

from studio_browser import (  # pyright: ignore[reportMissingImports]
    OWNER_TOKEN,
    Served,
    Visitor,
    a_browser,
    a_rollout,
    start_run,
)
from studio_server import serving

from tether.store.database.open import Workspace, open_engine, workspace_at
from tether.store.database.schema import metrics, runs, steps

STEPS, CURVES, TOKENS = 50_000, 20, 4_096
LIVE_STEPS = 20


def measure_pages(repeats: int) -> Iterator[tuple[str, list[float], str]]:
    """Each page with its seconds, in SQLite's workspace and one browser."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = workspace_at(Path(folder) / "runs", None)
        long_answer(workspace)
        many_points(workspace)
        with serving(workspace.directory, None, OWNER_TOKEN) as address, a_browser() as browser:
            served = Served(workspace, address)
            visitor = Visitor(browser, served)
            many = f"#/run/{served.run_id('many')}"
            tokens = f"#/run/{served.run_id('long')}/tokens?step=0&row=0"
            first = opened(visitor, many, ".chart canvas")  # the server has not read the run yet
            shown = "#page[data-shown='0/0'] .t"
            yield "microscope, 4,096 tokens", [opened(visitor, tokens, shown) for _ in range(repeats)], ""
            yield "color by another quantity", [recoloured(visitor) for _ in range(repeats)], ""
            yield "step to screen", step_to_screen(visitor, served, workspace), f"{LIVE_STEPS} steps"
            seconds = [opened(visitor, many, ".chart canvas") for _ in range(repeats)]
            yield "run page, a million points", seconds, f"the first time {1000 * first:.0f} ms"
            yield "zoom into it", [zoomed(visitor) for _ in range(repeats)], ""
            visitor.close()


def many_points(workspace: Workspace) -> None:
    """Write a run of a million points into the store at once."""
    recorder = start_run(workspace, "many", steps=STEPS)
    recorder.close("done")
    engine = open_engine(workspace)
    names = [
        "score",
        "kl_ref_k3",
        "entropy",
        "response_length",
        "truncated",
        "explained_variance",
        "value_loss",
        "value",
    ]
    names += [
        "logprob_diff",
        "approx_kl",
        "clip_fraction",
        "grad_norm/policy",
        "grad_norm/critic",
        "advantage_std",
        "loss",
    ]
    names += ["policy_loss", "seconds/step", "seconds/rollout", "score_std", "kl_coef"]
    noise = np.random.default_rng(0).normal(size=(STEPS, CURVES)).cumsum(axis=0) / 100
    with engine.begin() as connection:
        run = connection.execute(runs.select().where(runs.c.name == "many")).one().id
        connection.execute(steps.insert(), [{"run_id": run, "step": step, "recorded": 0.0} for step in range(STEPS)])
        for first in range(0, STEPS, 5000):
            rows = [
                {"run_id": run, "step": step, "name": name, "value": float(noise[step, place])}
                for step in range(first, first + 5000)
                for place, name in enumerate(names)
            ]
            connection.execute(metrics.insert(), rows)
        connection.execute(runs.update().where(runs.c.id == run).values(steps_done=STEPS))
    engine.dispose()


def long_answer(workspace: Workspace) -> None:
    """A run with four answers of 4,096 tokens."""
    recorder = start_run(workspace, "long", steps=1)
    words = [f" word{place % 97}" if place % 40 else "\n" for place in range(TOKENS)]
    recorder.record(0, {"score": 1.0}, [a_rollout(0, row, f"prompt {row}", words, 1.0) for row in range(4)])
    recorder.close("done")


OPENING = """([address, sign]) => new Promise((done) => {
  const start = performance.now();
  const page = document.querySelector("#page");
  const painted = () => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
  const look = () => {
    if (page.dataset.ready !== address || !document.querySelector(sign)) return;
    watcher.disconnect();
    painted();
  };
  const watcher = new MutationObserver(look);
  watcher.observe(document.body, { attributes: true, childList: true, subtree: true });
  location.hash = address;
})"""


def opened(visitor: Visitor, address: str, sign: str) -> float:
    """Seconds from requesting a page, in a browser on another page, until it is drawn and responds.

    Measured with the page's own clock, because driving the browser takes time too.
    """
    visitor.go("#/chat")
    return visitor.page.evaluate(OPENING, [address, sign]) / 1000


def zoomed(visitor: Visitor) -> float:
    """Seconds from the key to finer points on the screen."""
    start = time.perf_counter()
    with visitor.page.expect_response("**/metrics?**"):
        visitor.press("+")
    visitor.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - start


def recoloured(visitor: Visitor) -> float:
    """Seconds from the key to every token in its new color."""
    start = time.perf_counter()
    visitor.press("q")
    visitor.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - start


def step_to_screen(visitor: Visitor, served: Served, workspace: Workspace) -> list[float]:
    """Seconds from recording a step to seeing it, for several steps."""
    recorder = start_run(workspace, "live", steps=LIVE_STEPS + 1)
    recorder.record(0, {"score": 0.0})
    recorder.flush()
    visitor.go(f"#/run/{served.run_id('live')}")
    visitor.page.wait_for_selector("#connection[data-state='live']")
    seconds: list[float] = []
    for step in range(1, LIVE_STEPS + 1):
        start = time.perf_counter()
        recorder.record(step, {"score": float(step)})
        visitor.page.wait_for_selector(f".plot[aria-label*='{step} at step {step},']")
        seconds.append(time.perf_counter() - start)
    recorder.close("done")
    return seconds
