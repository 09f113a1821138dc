"""Ways to fail on one rank, which is chosen by its number."""

from __future__ import annotations

import os
import signal

import torch

from tether.learner.learner import Learner


def on_rank(rank: int) -> bool:
    return os.environ.get("RANK", "0") == str(rank)


def out_of_memory(monkeypatch) -> None:
    """Have a batch's second micro-batch run out of memory as long as it has several rows."""
    run = Learner._add_gradient

    def add(self, loss, outputs, part):
        if part.number == 1 and len(part.micro) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory: there is no room")
        run(self, loss, outputs, part)

    monkeypatch.setattr(Learner, "_add_gradient", add)


def not_finite(monkeypatch) -> None:
    """Have the loss of the second micro-batch be nan in the second step."""
    run = Learner._add_gradient

    def add(self, loss, outputs, part):
        bad = part.number == 1 and self.steps_taken == 1
        run(self, loss * float("nan") if bad else loss, outputs, part)

    step = Learner.step

    def counted(self):
        found = step(self)
        self.steps_taken += 1
        return found

    monkeypatch.setattr(Learner, "steps_taken", 0, raising=False)
    monkeypatch.setattr(Learner, "step", counted)
    monkeypatch.setattr(Learner, "_add_gradient", add)


def dies(rank: int, after: int, monkeypatch) -> None:
    """Have a rank be killed in the middle of a step."""
    run, seen = Learner._add_gradient, [0]

    def add(self, loss, outputs, part):
        seen[0] += 1
        if on_rank(rank) and seen[0] > after:
            os.kill(os.getpid(), signal.SIGKILL)
        run(self, loss, outputs, part)

    monkeypatch.setattr(Learner, "_add_gradient", add)


def raises(rank: int, monkeypatch) -> None:
    """Have a rank raise something that nobody expects."""
    run = Learner._add_gradient

    def add(self, loss, outputs, part):
        if on_rank(rank):
            raise ValueError("the moon is full")
        run(self, loss, outputs, part)

    monkeypatch.setattr(Learner, "_add_gradient", add)


def drifts(rank: int, monkeypatch) -> None:
    """Have a rank's weights differ in one bit after its first step."""
    step = Learner.step

    def drifting(self):
        found = step(self)
        if on_rank(rank):
            weight = next(iter(self.named.values())).data.view(-1)
            weight[:1].view(torch.int32).add_(1)
        return found

    monkeypatch.setattr(Learner, "step", drifting)
