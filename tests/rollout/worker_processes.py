"""Rollout workers forked from the test's own process, which has imported everything: each starts in a moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tether.distributed.launch import free_port
from tether.server.sampler_service import SamplerService, WorkerServer

TOKEN = "a-token-for-workers-of-tests"


class Forked:
    """A worker process at a fixed port, which can be killed, stopped and started again."""

    def __init__(self, make: Callable[[], SamplerService] = lambda: SamplerService("cpu")) -> None:
        self.make, self.port, self.process = make, free_port(), 0
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self, make: Callable[[], SamplerService] | None = None) -> None:
        """Fork it; it listens once this returns."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
            self.process = os.fork()
        if not self.process:
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)
                server = WorkerServer((make or self.make)(), host="127.0.0.1", port=self.port, token=TOKEN)
                os.write(writing, b"!")
                server.serve_forever()
            os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"!"
        os.close(reading)

    def kill(self) -> None:
        """End it as a machine that fails would: without a word."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
        self.process = 0

    def hang(self) -> None:
        """Stop it, with its connections open."""
        os.kill(self.process, signal.SIGSTOP)


@contextmanager
def workers(count: int, make: Callable[[], SamplerService] = lambda: SamplerService("cpu")) -> Iterator[list[Forked]]:
    """Workers, which end with the test."""
    found: list[Forked] = []
    try:
        for _ in range(count):
            found.append(Forked(make))
        yield found
    finally:
        for worker in found:
            worker.kill()


class SlowService(SamplerService):
    """Takes a while for each chunk, so that a test can come between."""

    def generate(self, request):
        time.sleep(0.2)
        return super().generate(request)
