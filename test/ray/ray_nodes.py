"""Three Ray nodes on this machine, and the lightserve command against them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightserve.ray import client
from lightserve.ray.messages import DeploymentStatus
from test.waiting import wait_until

COMMAND_S = 900.0  # a rolling update waits for the streams
CHANGE_S = 180.0  # for replicas to start or end on a loaded machine
CLI = (sys.executable, "-m", "lightserve.cli.main")


@dataclass
class RayNodes:
    cluster: Any
    nodes: list[Any] = field(default_factory=list)  # besides the head

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1))

    def kill(self, node_id: str) -> None:
        """As if its machine was switched off."""
        node = next(one for one in self.nodes if one.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def run(self, *command: str, code: int = 0) -> str:
        """Output of the lightserve command."""
        done = subprocess.run(
            [*CLI, *command, "--ray_address", self.address], capture_output=True, text=True, timeout=COMMAND_S
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr


@contextmanager
def ray_nodes(folder: Path, count: int) -> Iterator[RayNodes]:
    """The head and ``count`` nodes, with a CPU each. This process is connected to them."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112  its name
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder), "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = RayNodes(cluster)
        for _ in range(count):
            nodes.add()
        ray.init(address=cluster.address, namespace="lightserve", log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def status(name: str = "lightserve") -> DeploymentStatus:
    return client.status(name)


def wait_serving(count: int, name: str = "lightserve") -> DeploymentStatus:
    """Until exactly so many replicas take requests, and there is no other one."""

    def is_so() -> bool:
        replicas = status(name).replicas
        return len(replicas) == count and all(one.takes_requests for one in replicas)

    wait_until(is_so, CHANGE_S)
    return status(name)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return True
    except (OSError, urllib.error.HTTPError):
        return False
