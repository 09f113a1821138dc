"""A real Ray cluster on this machine's loopback address: a head and several raylets, each of which can be killed."""

from __future__ import annotations

import os
import signal
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # after a head is lost, its cluster ends
os.environ.setdefault("RAY_health_check_period_ms", "500")
os.environ.setdefault("RAY_health_check_failure_threshold", "4")

from rank_kills import parent_of
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

LOOPBACK = "127.0.0.1"
MEMORY = {"object_store_memory": 80_000_000, "node_ip_address": LOOPBACK, "include_dashboard": False}


class RayCluster:
    """A head without room, and machines with room for one process each."""

    def __init__(self, machines: int, port: int) -> None:
        self.port = port
        self.machines: list[Any] = []
        self.start(machines)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def start(self, machines: int) -> None:
        """Begin, or begin again at the same address."""
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**MEMORY, "num_cpus": 0, "gcs_server_port": self.port}
        )
        self.machines = []
        for _ in range(machines):
            self.add()

    def add(self) -> None:
        """One more machine."""
        self.machines.append(self.cluster.add_node(**MEMORY, num_cpus=1))

    def kill_machine(self, index: int) -> None:
        """As if a machine lost power: its raylet is killed, and with it go the actors."""
        node = self.machines.pop(index)
        for info in node.all_processes["raylet"]:
            os.kill(info.process.pid, signal.SIGKILL)
        self.cluster.worker_nodes.discard(node)

    def machine_of(self, pid: int) -> int:
        """The number of the machine that holds a process: its actor is a child of the raylet."""
        up = {info.process.pid: at for at, node in enumerate(self.machines) for info in node.all_processes["raylet"]}
        while pid > 1:
            if pid in up:
                return up[pid]
            pid = parent_of(pid)
        raise ProcessLookupError(pid)

    def replace_machine_of(self, pid: int) -> None:
        """Kill a machine, and add another."""
        self.kill_machine(self.machine_of(pid))
        self.add()

    def kill_head(self) -> None:
        """The head's own process; all that it knew is lost."""
        for info in self.cluster.head_node.all_processes["gcs_server"]:
            os.kill(info.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.cluster.shutdown()
