"""A PostgreSQL server of a test's own, which can be stopped, frozen and started again."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine


class OwnPostgres:
    """On a socket in a folder of its own; `data` may lie elsewhere, such as on a disk that is nearly full."""

    def __init__(self, data: Path | None = None, *options: str) -> None:
        pytest.importorskip("psycopg", reason="PostgreSQL is not tested: the package psycopg is not installed")
        if not shutil.which("initdb") or not shutil.which("postgres"):
            pytest.skip("PostgreSQL is not tested: its programs are not on PATH")
        self.user = {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}
        self.folder = Path(tempfile.mkdtemp(prefix="tether-own-pg-", dir="/tmp"))
        self.data = data or self.folder / "data"
        if self.user:
            for place in (self.folder, *([data] if data else [])):
                shutil.chown(place, **self.user)
        self.quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self.folder} | self.user
        words = ["-U", "tether", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run(["initdb", "-D", str(self.data), *words], check=True, **self.quiet)
        self.options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}", *options]
        self.url = f"postgresql+psycopg://tether@/postgres?host={self.folder}"
        self.process = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(["postgres", "-D", str(self.data), *self.options], **self.quiet)
        engine = create_engine(self.url)
        for _ in range(200):
            try:
                with engine.connect():
                    return
            except Exception:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        """At once, without waiting for those who are connected."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=30)

    def kill(self) -> None:
        """As a machine that loses its power: what was acknowledged is in its log."""
        self._all(signal.SIGKILL)
        self.process.wait(timeout=30)
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def freeze(self) -> None:
        """It takes connections, and answers no one."""
        self._all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._all(signal.SIGCONT)

    def _all(self, number: int) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for process in (self.process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def __enter__(self) -> "OwnPostgres":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
