"""A PostgreSQL server for a benchmark, with its own folder and socket; commits wait for the disk, as by default."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError


@contextmanager
def throwaway_postgres() -> Iterator[str | None]:
    """Its URL; None where PostgreSQL is not installed."""
    if not shutil.which("initdb") or not shutil.which("postgres"):
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="tether-pg-", dir="/tmp"))
    user: dict[str, Any] = {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}  # it rejects root
    if user:
        shutil.chown(folder, **user)
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder} | user
    data = str(folder / "data")
    words = ["-U", "tether", "-A", "trust", "-E", "UTF8", "--locale=C"]
    subprocess.run(["initdb", "-D", data, *words], check=True, **options)
    words = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
    server = subprocess.Popen(["postgres", "-D", data, *words], **options)
    url = f"postgresql+psycopg://tether@/postgres?host={folder}"
    try:
        _wait_for(url)
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # do not wait for open connections
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with create_engine(url).connect():
                return
        except OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
