"""The doctor is asked once for a run as it stands, and again when anything of it was written."""

from __future__ import annotations

import pytest
from recording import Recording
from studio_clients import settings

from tether.doctor.doctor import Doctor, Examination
from tether.store.database.open import workspace_at
from tether.store.read import list_runs, read_run
from tether.store.recorded import RecordedRun
from tether.studio.app import open_studio


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the run had at each examination."""
    seen: list[int] = []
    examine = Doctor.examination

    def counted(self: Doctor, run: RecordedRun) -> Examination:
        seen.append(len(run.metrics))
        return examine(self, run)

    monkeypatch.setattr(Doctor, "examination", counted)
    return seen


def test_a_run_is_examined_once_until_it_is_written_again(tmp_path, store_url, examined: list[int]):
    recording = Recording(tmp_path, store_url, steps=9)
    recording.steps(0, 1, 2)
    assert recording.recorder.flush()
    studio = open_studio(workspace_at(tmp_path / "runs", store_url), settings())

    def ask() -> Examination:
        [run] = list_runs(studio.opened)
        return studio.doctor.of(run)

    assert ask() is ask() and examined == [3]
    recording.steps(3)
    assert recording.recorder.flush() and ask() is ask() and examined == [3, 4], "a step"
    recording.recorder.event("note", "something happened")
    assert recording.recorder.flush() and ask() is ask() and examined == [3, 4, 4], "an event"
    recording.recorder.rewind(1)
    assert recording.recorder.flush() and ask() is ask() and examined == [3, 4, 4, 1], "steps taken back"
    recording.recorder.close("done")
    assert ask() is ask() and examined == [3, 4, 4, 1, 1], "its end"
    assert repr(ask()) == repr(Doctor().examination(read_run(studio.opened, list_runs(studio.opened)[0].name)))
    studio.vote_writer.close()
    studio.opened.close()
