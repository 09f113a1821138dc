"""A Studio in a process of its own, which can be killed, and reading its stream."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

TOKEN = "live-token-of-the-tests"


class LiveServer:
    """`tether studio` over a folder, on a free port."""

    def __init__(self, folder: Path, url: str | None = None, *more: str, variables=None, **popen) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("TETHER_STORE", None)
        if url is not None:
            environment["TETHER_STORE"] = url
        environment |= {"TETHER_STUDIO_TOKEN": TOKEN, **(variables or {})}
        words = ["studio", "--workspace", str(folder), "--port", "0", "--json", *more]
        pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment, **popen}
        self.process = subprocess.Popen([sys.executable, "-m", "tether", *words], **pipes)
        self.told = json.loads(self.process.stdout.readline())
        assert self.told["token"] is None, "a token that was chosen is not shown"
        self.told["token"] = TOKEN
        self.client = httpx.Client(
            base_url=self.told["address"], headers={"authorization": f"Bearer {TOKEN}"}, timeout=30.0
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=30)

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *_) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.kill()
        self.process.stdout.close()


def messages(reply: httpx.Response) -> Iterator[tuple[str, dict, str]]:
    """(event, data, id) of a stream, as they come."""
    fields: dict[str, str] = {}
    for line in reply.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
            fields = {}
        else:
            fields = {}
