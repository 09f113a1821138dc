"""Trackers get the metrics; one that fails, hangs or is not there never hurts the run."""

import math
import threading
from pathlib import Path

import pytest

import tether.store.trackers as sinks_module
from tether.errors import ConfigError
from tether.store.trackers import TrackedRun, Trackers, open_trackers


class Keeping:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def record(self, step, metrics) -> None:
        self.steps.append((step, metrics))

    def close(self) -> None:
        self.closed = True


class Crashing(Keeping):
    """A tracker that fails at its second step, or at its end."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def record(self, step, metrics) -> None:
        super().record(step, metrics)
        if self.at == "record" and step == 1:
            raise ConnectionError("the service is down")

    def close(self) -> None:
        if self.at == "close":
            raise ConnectionError("the service is down")


@pytest.mark.parametrize("at", ["record", "close"])
def test_a_crashing_sink_is_told_once_and_the_others_go_on(at: str):
    good, bad, said = Keeping(), Crashing(at), []
    trackers = Trackers({"bad": bad, "good": good}, said.append)
    for step in range(4):
        trackers.record(step, {"loss": 1.0 / (step + 1)})
    trackers.close()
    assert [step for step, _ in good.steps] == [0, 1, 2, 3] and good.closed
    assert len(bad.steps) == (2 if at == "record" else 4)
    assert len(said) == 1 and said[0].startswith("bad failed") and "the service is down" in said[0]


def test_a_notify_that_raises_ends_nothing():
    def rude(text):
        raise RuntimeError

    good = Keeping()
    trackers = Trackers({"bad": Crashing("record"), "good": good}, rude)
    for step in range(3):
        trackers.record(step, {})
    trackers.close()
    assert len(good.steps) == 3


def test_a_hanging_sink_neither_stops_a_step_nor_the_end(monkeypatch):
    monkeypatch.setattr(sinks_module, "MAX_WAITING", 2)
    gate, said = threading.Event(), []

    class Hanging(Keeping):
        def record(self, step, metrics) -> None:
            gate.wait(20)

    trackers = Trackers({"slow": Hanging()}, said.append)
    for step in range(10):
        trackers.record(step, {})
    trackers.close(timeout=0.05)
    gate.set()
    assert [text.split(":")[0] for text in said] == [
        "The metric trackers are too slow",
        "A metric tracker did not finish in time and was abandoned.",
    ]


def test_metrics_are_as_they_were_when_they_were_handed_over():
    keeping = Keeping()
    trackers = Trackers({"one": keeping}, print)
    metrics = {"loss": 1.0}
    trackers.record(0, metrics)
    metrics["loss"] = 2.0
    trackers.close()
    assert keeping.steps == [(0, {"loss": 1.0})]


def place(tmp_path: Path) -> TrackedRun:
    return TrackedRun("demo/ppo", tmp_path, {"run": {"seed": 1}})


def test_an_unknown_sink_is_wrong_usage(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"store\.trackers.*tensorboard"):
        open_trackers(["tensorbored"], place(tmp_path), print)


def test_a_sink_that_is_not_installed_or_does_not_open_is_told_and_left_out(tmp_path: Path, monkeypatch):
    def missing(place):
        raise ImportError("No module named 'wandb'")

    def offline(place):
        raise OSError("no network")

    monkeypatch.setitem(sinks_module.TRACKERS, "wandb", missing)
    monkeypatch.setitem(sinks_module.TRACKERS, "trackio", offline)
    said: list[str] = []
    trackers = open_trackers(["wandb", "trackio"], place(tmp_path), said.append)
    trackers.record(0, {"loss": 1.0})
    trackers.close()
    assert "tether-rl[wandb]" in said[0] and "no network" in said[1]


def test_tensorboard_gets_every_finite_and_infinite_number(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    trackers = open_trackers(["tensorboard"], place(tmp_path), said.append)
    for step in range(3):
        trackers.record(step, {"score": 0.5 * step, "bad": math.nan})
    trackers.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("score")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert len(read.Scalars("bad")) == 3 and said == []
