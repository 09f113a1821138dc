"""What the doctor says of runs, remembered until a run is written again: pages ask each time that they are opened."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tether.doctor.doctor import Doctor, Examination
from tether.store.read import OpenWorkspace, RunSummary, recorded
from tether.studio.metric_cache import MetricCache
from tether.studio.run_queries import last_event

MAX_RUNS = 100


class Consultations:
    """One doctor for all pages. A long run keeps it busy for half a second, so that one run is examined at a time."""

    def __init__(self, opened: OpenWorkspace, metrics: MetricCache) -> None:
        self._opened, self._metrics = opened, metrics
        self._heard: OrderedDict[int, tuple[tuple[object, ...], Examination]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: RunSummary) -> Examination:
        """What every audit says of a run as it is now. Its metrics are the ones that its curves were drawn from."""
        with self._lock:
            written = (run.created, run.updated, run.state, run.steps_done, last_event(self._opened, run.id))
            known, said = self._heard.pop(run.id, (None, None))
            if said is None or known != written:
                said = Doctor().examination(recorded(self._opened, run, self._metrics.rows(run.id)))
            self._heard[run.id] = (written, said)
            if len(self._heard) > MAX_RUNS:
                self._heard.popitem(last=False)
            return said
