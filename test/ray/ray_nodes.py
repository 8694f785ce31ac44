"""Three Ray nodes on this machine, and the lightserve command against them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightserve.cli.main import main
from lightserve.ray import client
from lightserve.ray.messages import DeploymentStatus
from test.api.server import ServerProcess
from test.waiting import wait_until

COMMAND_S = 900.0  # a rolling update waits for the streams
STORE_BYTES = 80 << 20  # of each node
CHANGE_S = 180.0  # for replicas to start or end on a loaded machine
PAUSE_S = 0.2  # between two questions to the cluster: each keeps three processes busy, which others need to start
CLI = (sys.executable, "-m", "lightserve.cli.main")


class Gateway(ServerProcess):
    """The server at a URL, whose process belongs to Ray."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url


@dataclass
class RayNodes:
    cluster: Any
    nodes: list[Any] = field(default_factory=list)  # besides the head

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, count: int = 1) -> None:
        """They start one after the other, and are waited for together."""
        options = {"wait": False, "num_cpus": 1, "object_store_memory": STORE_BYTES}
        self.nodes += [self.cluster.add_node(**options) for _ in range(count)]
        self.cluster.wait_for_nodes()

    @property
    def others(self) -> set[str]:
        """Nodes besides the head, which can be killed."""
        return {node.node_id for node in self.nodes}

    def kill(self, node_id: str) -> None:
        """As if its machine was switched off."""
        node = next(one for one in self.nodes if one.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def run(self, *command: str) -> str:
        """Output of the lightserve command, in a process of its own."""
        done = subprocess.run(
            [*CLI, *command, "--ray_address", self.address], capture_output=True, text=True, timeout=COMMAND_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def call(self, *command: str, code: int = 0) -> str:
        """The same in this process, which has imported Ray already: that takes two seconds."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            found = main([*command, "--ray_address", self.address])
        assert found == code, out.getvalue() + err.getvalue()
        return (out if code == 0 else err).getvalue()


@contextmanager
def ray_nodes(folder: Path, count: int) -> Iterator[RayNodes]:
    """The head and ``count`` other nodes, with a CPU each. This process is connected to them."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["REPORTER_UPDATE_INTERVAL_MS"] = "600000"  # of what an agent of each node measures for the dashboard
    os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112  its name
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # Serve kills a proxy that takes 5 s on a busy machine
    os.environ["RAY_health_check_period_ms"] = "1000"  # noqa: SIM112  a lost node is noticed after 3 s, not 13
    os.environ["RAY_health_check_failure_threshold"] = "3"  # noqa: SIM112
    os.environ["RAY_TMPDIR"] = str(folder)  # /tmp/ray may be missing, and has the address of another cluster
    unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, **unused}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = RayNodes(cluster)
        nodes.add(count)
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

    wait_for(is_so)
    return status(name)


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, CHANGE_S, PAUSE_S)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return True
    except (OSError, urllib.error.HTTPError):
        return False
