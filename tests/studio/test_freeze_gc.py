"""What a server has loaded is no work for the garbage collector, and what it lets go of still goes."""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.studio.connections import freeze_gc


class Loop:
    """Something that only the collector can take away: it holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


def test_what_is_loaded_is_not_looked_through_again():
    kept = Loop()
    freeze_gc()
    assert gc.get_freeze_count() > 0
    assert all(thing is not kept for thing in gc.get_objects())


def test_what_was_left_over_before_is_collected_and_not_kept_for_ever():
    left_over = weakref.ref(Loop())
    freeze_gc()
    assert left_over() is None


def test_what_was_here_to_stay_and_was_let_go_of_after_all_goes_the_next_time():
    model = Loop()
    freeze_gc()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is not None
    freeze_gc()
    assert gone() is None


def test_the_server_settles_and_shares_time_finely_before_it_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("uvicorn")
    from tether.server import serve

    seen: list[int] = []
    monkeypatch.setattr(serve, "announce_studio", lambda *_, **__: seen.append(gc.get_freeze_count()))
    monkeypatch.setattr(serve, "serve_until_stopped", lambda _, listening: listening.close())
    gc.unfreeze()
    words = {"host": "127.0.0.1", "port": 0, "workspace": str(tmp_path / "runs"), "json": True}
    words |= {"token": None, "token_file": None, "public_url": None, "trusted_proxies": None}
    assert serve.serve_studio(argparse.Namespace(**words)) == 0
    assert seen[0] > 10_000
    assert sys.getswitchinterval() == pytest.approx(serve.SWITCH_SECONDS)
