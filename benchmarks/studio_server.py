"""Studio in its own process, as users start it; for benchmarks/studio.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN = "benchmark-token-of-studio"


@contextmanager
def serving(folder: Path, url: str | None, token: str = TOKEN) -> Iterator[str]:
    """The address of a server over a workspace, which is created if missing."""
    environment = {name: value for name, value in os.environ.items() if name != "TETHER_STORE"}
    words = ["studio", "--workspace", str(folder), "--port", "0", "--json"]
    command = [sys.executable, "-m", "tether", *words]
    environment |= {"TETHER_STUDIO_TOKEN": token} | ({"TETHER_STORE": url} if url else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        try:
            yield address
        finally:
            process.terminate()
