"""The process that runs a user's function for `tether.rewards.pool`: lines of JSON in, lines of JSON out.

It ends when its parent ends: a thread reads the requests and exits the process at their end, even during a call. If the
function also holds the GIL, a timer of the operating system ends the process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from tether.errors import ConfigError
from tether.rewards import consent
from tether.rewards.calling import Caller, CallError, Outcome, explain, read_signature
from tether.rewards.resolve import resolve

GRACE = 10.0  # seconds past the limit; by then a living parent has killed this process


def main() -> int:
    """Answer requests until the pipe closes."""
    source, replies = take_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(source, requests), daemon=True).start()
    setup = requests.get()
    sys.path[:] = setup["path"]
    agreed = {"folder": Path(setup["folder"]), "given": tuple(setup["allowed"])}  # the parent has already asked
    try:
        with consent.consenting(**agreed):
            function = resolve(setup["function"], setup["field"])
        signature = read_signature(function, setup["takes"], setup["function"], setup["field"])
    except ConfigError as error:
        reply(replies, {"refused": str(error)})
        return 1
    reply(replies, {"signature": dataclasses.asdict(signature)})
    caller = Caller(function, signature, setup["seconds"])
    while True:
        request = requests.get()
        if "describe" in request:
            reply(replies, {"signature": dataclasses.asdict(signature)})
        else:
            reply(replies, answer(caller, request, setup["seconds"]))


def answer(caller: Caller, request: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """The outcomes of a request's samples; `failed` where the function cannot score them."""
    seed_generators(request["seed"])
    samples = request["samples"]
    rollouts = []
    if caller.signature.takes == "rollouts":
        from tether.rewards.function import rollout_from  # torch is imported only for functions of rollouts

        rollouts = [rollout_from(sample) for sample in samples]
    set_timer(None if seconds is None else seconds + GRACE)
    try:
        outcomes: list[Outcome] = caller.outcomes(samples, rollouts)
    except CallError as error:
        return {"failed": str(error)}
    except BaseException as error:  # Ctrl-C is ignored here, so everything comes from the function
        return {"failed": f"raised {explain(error)}"}
    finally:
        set_timer(None)
    return {"outcomes": [outcome.as_json() for outcome in outcomes]}


def take_pipes() -> tuple[TextIO, TextIO]:
    """The pipes to the parent; the function gets an empty standard input, and its output goes to standard error."""
    source = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, replies


def read_requests(source: TextIO, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue each request; at their end, end this process and what the function started."""
    for line in source:
        requests.put(json.loads(line))
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def reply(replies: TextIO, message: dict[str, Any]) -> None:
    """Send one line."""
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def seed_generators(seed: int) -> None:
    """Seed the random generators, so that results depend on the answers and not on which worker gets them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def set_timer(seconds: float | None) -> None:
    """Let the operating system end this process after `seconds`; None cancels the timer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)


if __name__ == "__main__":
    sys.exit(main())
