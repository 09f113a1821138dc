"""`python -m tether.sweeps.trial_process`: train one trial, up to a step, in a process of its own.

The request is one line of JSON on standard input, which then stays open: when it closes, the sweep was killed, and the
trial ends at once; its last checkpoint is what the next attempt continues from. Every step, and the end, is one line of
JSON on standard output. Everything else goes to standard error, which is the trial's log.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import Stopped, TetherError, judge, prepare_streams
from tether.processes import leave_working_folder
from tether.redact import redact


@dataclass(frozen=True)
class TrialRequest:
    """What a trial process is asked to do."""

    recipe: dict[str, Any]  # as a run stores it
    until: int | None  # stop after this many steps, with a checkpoint; None: to the end
    allowed: list[str]  # the code that --allow-code named
    sweep: str  # its folder, whose seal covers the code of the recipe
    threads: int


def main() -> int:
    """Train the requested trial; the exit code is that of `tether train`."""
    prepare_streams()
    leave_working_folder()
    request = TrialRequest(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_sweep, daemon=True, name="sweep").start()
    try:
        steps, finished = train_trial(request, _report_step)
        _tell({"ended": "done" if finished else "paused", "steps": steps})
        return 0 if finished or (request.until is not None and steps >= request.until) else Stopped.exit_code
    except BaseException as error:  # a reward may raise anything
        message, code = judge(error)
        if not isinstance(error, TetherError):
            print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
        _tell({"ended": "error", "reason": redact(message), "exit_code": code})
        return code


def _end_with_the_sweep() -> None:
    """Wait until standard input closes; then the sweep is gone."""
    os.read(0, 1)  # not by `sys.stdin`, whose lock would be held while Python shuts down
    os._exit(Stopped.exit_code)


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _report_step(done: int) -> None:
    _tell({"step": done})


def train_trial(request: TrialRequest, advance: Callable[[int], None]) -> tuple[int, bool]:
    """Start the trial or continue it; returns the number of steps taken and whether it is finished."""
    import torch

    from tether.config.control_recipe import ControlRecipe
    from tether.progress import say
    from tether.rewards import consent
    from tether.train.run import interruptions

    torch.set_num_threads(request.threads)
    consent.begin(request.allowed)
    train = _train_control if request.recipe["method"] == ControlRecipe.method else _train_model
    taken = 0

    def count(step: int, metrics: dict[str, float]) -> None:
        nonlocal taken
        del metrics
        taken = step + 1
        advance(taken)

    def begin(total: int, done: int) -> None:
        nonlocal taken
        del total
        taken = done
        advance(done)

    with interruptions() as asked:
        return train(request, lambda: asked() or _reached(taken, request.until), begin, count, say)


def _reached(taken: int, until: int | None) -> bool:
    return until is not None and taken >= until


def _train_model(
    request: TrialRequest, stop: Callable[[], bool], begin: Any, advance: Any, notify: Callable[[str], None]
) -> tuple[int, bool]:
    from tether.config.allowed_code import code_names
    from tether.config.load import recipe_from_record
    from tether.rewards.agree import agree_to_names
    from tether.store.folder import RunFolder, is_run, run_path
    from tether.train.resume import resumable_recipe
    from tether.train.run import train_recipe

    recipe = recipe_from_record(request.recipe)
    folder = run_path(recipe)
    resume = is_run(folder) and not RunFolder(folder).is_free
    if resume:
        stored = resumable_recipe(folder)
        recipe = stored.model_copy(update={"run": recipe.run, "store": recipe.store})
    else:
        names = code_names(recipe)
        agree_to_names(names, names, Path(request.sweep))
    trained = train_recipe(recipe, stop=stop, advance=advance, begin=begin, notify=notify, resume=resume)
    return trained.steps, trained.finished


def _train_control(
    request: TrialRequest, stop: Callable[[], bool], begin: Any, advance: Any, notify: Callable[[str], None]
) -> tuple[int, bool]:
    from tether.config.load import control_from_record
    from tether.control.run import stored_control, train_control
    from tether.store.folder import RunFolder, is_run, run_path
    from tether.train.run import Watch

    class Steps(Watch):
        def begin(self, total: int, done: int) -> None:
            begin(total, done)

        def advance(self, step: int, metrics: dict[str, float]) -> None:
            advance(step, metrics)

    recipe = control_from_record(request.recipe)
    folder = run_path(recipe)
    resume = is_run(folder) and not RunFolder(folder).is_free
    if resume:
        recipe = stored_control(folder).model_copy(update={"run": recipe.run, "store": recipe.store})
    place, steps = train_control(recipe, stop=stop, notify=notify, watch=Steps(), resume=resume)
    return steps, place.is_finished


if __name__ == "__main__":
    sys.exit(main())
