"""Replicas on three simulated Ray nodes: deploy, kill a replica, kill a node, and always the same text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="the extra lightserve[ray] is not installed")

import ray

from lightserve.ray import cluster as ray_cluster
from test.api.server import ServerProcess
from test.api.test_dp import bodies, expected, model, one
from test.api.test_restart import Clients
from test.ray.ray_nodes import CHANGE_S, RayNodes, ray_nodes, status, wait_serving
from test.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

__all__ = ["expected", "model", "one"]  # fixtures
STREAMS, STREAMS_LONG = 30, 200
FLAGS = ("--deterministic", "--max_total_token_num", "8192", "--port", "0", "--device", "cpu")


class Gateway(ServerProcess):
    """The server at a URL, whose process belongs to Ray."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_nodes(Path(folder), 3) as found:
        yield found


@pytest.fixture(scope="module")
def deployed(nodes: RayNodes, model: Path) -> Iterator[Gateway]:
    printed = nodes.run("deploy", str(model), "--replicas", "3", *FLAGS)
    yield Gateway(printed.split()[0])
    nodes.run("undeploy")
    assert not ray_cluster.actor_names("lightserve/")


@pytest.fixture
def streams(request: pytest.FixtureRequest) -> int:
    return STREAMS_LONG if request.config.getoption("--long") else STREAMS


def ask_while(gateway: Gateway, streams: int, break_it: Callable[[], Any]) -> list[Any]:
    """The answers to many requests at once. Something breaks in the middle of them."""
    kinds = bodies()
    with ThreadPoolExecutor(streams) as threads:
        clients = Clients(gateway, threads)
        asked = clients.ask([kinds[index % len(kinds)] for index in range(streams)])
        wait_until(lambda: clients.events > 10 * streams, CHANGE_S)
        break_it()
        return [answer.result() for answer in asked]


def repeated(expected: list[Any], count: int) -> list[Any]:
    return [expected[index % len(expected)] for index in range(count)]


def moved(gateway: Gateway) -> float:
    return gateway.metrics()["dp_requests_moved_total"]


def engine_pids() -> set[int]:
    return {one.pid for one in psutil.process_iter() if one.name() == "ls-router"}


def test_deploy_places_a_replica_on_each_node_and_all_serve_the_same_text(
    nodes: RayNodes, deployed: Gateway, expected: list[Any], streams: int
) -> None:
    found = status()

    assert len({one.node for one in found.replicas}) == 3
    assert found.gateway.process.address == deployed.url
    assert ask_while(deployed, streams, lambda: None) == repeated(expected, streams)
    shown = nodes.run("status")
    assert "3 of 3 replicas serve" in shown
    assert shown.count(" serving ") == 3 + 1


def test_a_killed_replica_loses_no_stream_and_ray_restarts_it(
    deployed: Gateway, expected: list[Any], streams: int
) -> None:
    before, (first, *_) = moved(deployed), status().replicas

    def kill() -> None:
        ray.kill(ray_cluster.get_actor(f"lightserve/{first.replica}"), no_restart=False)
        wait_until(lambda: moved(deployed) > before)

    found = ask_while(deployed, streams, kill)

    assert found == repeated(expected, streams)
    wait_until(lambda: status().replicas[0].process.address != first.process.address, CHANGE_S)
    assert status().replicas[0].replica == first.replica
    wait_serving(3)


def test_a_killed_node_loses_no_stream_and_a_new_node_takes_its_replica(
    nodes: RayNodes, deployed: Gateway, expected: list[Any], streams: int
) -> None:
    before, lost = moved(deployed), status().replicas[1]

    def kill() -> None:
        nodes.kill(lost.node)
        wait_until(lambda: moved(deployed) > before)

    found = ask_while(deployed, streams, kill)

    assert found == repeated(expected, streams)
    nodes.add()
    wait_until(lambda: status().replicas[1].node not in ("", lost.node), CHANGE_S)
    wait_serving(3)
