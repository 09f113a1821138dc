"""An actor of a Ray cluster, which holds one process: started once, watched, and ended with the actor."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.distributed.launch import LAUNCHER, LEASH
from tether.processes import environment, python


class RankHost:
    """What runs on a machine of the cluster: a rank's process, and what it prints."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.printed: list[tuple[int, bytes]] = []  # (1 or 2, text)
        self.readers: list[threading.Thread] = []

    def place(self) -> tuple[str, int]:
        """The address of this machine in the cluster, and a port of it that is free."""
        import ray  # pyright: ignore[reportMissingImports]

        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as asked:
            asked.bind((address, 0))
            return address, asked.getsockname()[1]

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Start the rank; its standard input is what it ends with, should this process end."""
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder}, which tether was started in, is not on {socket.gethostname()}")
        env = {**environment(), **variables, LAUNCHER: str(os.getpid()), LEASH: "stdin"}
        self.process = subprocess.Popen(  # noqa: S603 (our own command line)
            python("-m", "tether", *words),
            env=env, cwd=folder, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        for number, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            reader = threading.Thread(target=self._read, args=(number, stream), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, number: int, stream: Any) -> None:
        for line in stream:
            self.printed.append((number, line))

    def poll(self) -> tuple[int | None, list[tuple[int, bytes]]]:
        """The exit code, or None, and what was printed since the last call."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            for reader in self.readers:
                reader.join(2.0)
        printed, self.printed = self.printed, []
        return code, printed

    def send_signal(self, number: int) -> None:
        """Send the rank a signal."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
