"""A server whose ranks are on several nodes (--nnodes) gives the text of one rank, also when a node dies."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from test.api.nodes import Nodes, nodes_in
from test.api.server import ServerProcess, running_server
from test.api.test_kv_tiers import KV_TOKENS, ask, ask_after_eviction
from test.api.test_pp import launches
from test.api.test_restart import answers, clients_of, kill_worker, sixteen
from test.ports import free_port
from test.small_text import save_small_model
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp]

FLAGS = ("--device", "cpu", "--max_total_token_num", "4096")
RESTART_S = 120.0  # to notice a lost node and to load again, on a loaded machine


class TwoStages:
    """Two nodes with a pipeline stage each."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.other = nodes.start(1)
        self.first = nodes.start(0)


@pytest.fixture(scope="module")
def stages(spoilt_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoStages]:
    folder = tmp_path_factory.mktemp("nodes")
    flags = (*FLAGS, "--model_dir", spoilt_model, "--pp", "2", "--profile_dir", str(folder / "profiles"))
    with nodes_in(folder, 2, *flags) as nodes:
        stages = TwoStages(nodes)
        nodes.wait_ready(stages.first)
        yield stages


def answers_despite(server: ServerProcess, fault: Callable[[], None]) -> list[Any]:
    with clients_of(server) as clients:
        responses = clients.ask(sixteen())
        wait_until(lambda: clients.events > 100)
        fault()
        return [response.result() for response in responses]


def test_stages_on_two_nodes_give_the_text_of_one_rank(stages: TwoStages, of_one_rank: list[Any]) -> None:
    assert answers(stages.first) == of_one_rank

    assert list(stages.other.processes()) == ["ls-worker-1"]  # no HTTP, no router
    stages.other.wait_for_log("node 1 of 2 is connected to node 0")
    assert "2, connected at 127.0.0.1:" in stages.first.log  # the banner


@pytest.mark.long
def test_a_profile_has_the_steps_of_all_nodes(stages: TwoStages) -> None:
    stages.first.post("/start_profile", {"max_seconds": 60})
    with clients_of(stages.first) as clients:
        _ = [response.result() for response in clients.ask(sixteen()[:4])]
    _, profile = stages.first.post("/stop_profile", {})
    events = json.loads(gzip.decompress(Path(profile["path"]).read_bytes()))["traceEvents"]

    assert profile["missing"] is None
    here, there = (launches(events, f"model worker {rank}") for rank in range(2))
    assert len(here) == len(there) > 50
    of_torch = {one["pid"] for one in events if one["name"].startswith("aten::")}
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert {names[pid] for pid in of_torch} == {"model worker 0", "model worker 1"}
    assert not list((stages.nodes.folder / "profiles").glob(".*"))  # no parts are left


@pytest.mark.long
def test_a_rank_that_dies_on_another_node_is_replaced_and_no_text_changes(
    stages: TwoStages, of_one_rank: list[Any]
) -> None:
    found = answers_despite(stages.first, lambda: kill_worker(stages.other, "ls-worker-1"))

    assert found == of_one_rank, stages.nodes.logs()
    stages.first.wait_for_log("model worker 1 on node 1 died (signal 9); restarting the workers")


def test_a_node_that_is_killed_and_started_again_joins_and_no_text_changes(
    stages: TwoStages, of_one_rank: list[Any]
) -> None:
    def kill_and_start() -> None:
        stages.other.process.kill()
        stages.other.process.wait()
        stages.other = stages.nodes.start(1)

    assert answers_despite(stages.first, kill_and_start) == of_one_rank, stages.nodes.logs()

    stages.first.wait_for_log("node 1 is lost")
    wait_until(lambda: stages.first.metrics()["kv_used_tokens"] == 0)


@pytest.mark.long
def test_a_node_waits_for_node_0_when_that_is_killed_and_serves_the_next_one(
    stages: TwoStages, of_one_rank: list[Any]
) -> None:
    stages.first.process.kill()
    stages.first.process.wait()
    wait_until(lambda: not stages.other.processes(), RESTART_S)  # its ranks have ended
    stages.first = stages.nodes.start(0)
    stages.nodes.wait_ready(stages.first)

    assert answers(stages.first) == of_one_rank
    assert stages.first.stop() == 0
    assert stages.other.stop() == 0


def test_ranks_of_one_layer_on_two_nodes_give_the_text_of_one_rank(
    spoilt_model: str, of_one_rank: list[Any], tmp_path: Path
) -> None:
    with nodes_in(tmp_path / "tp", 2, *FLAGS, "--model_dir", spoilt_model, "--tp", "2") as nodes:
        first = nodes.start(0)
        wait_until(lambda: "waiting up to 600 s for node 1" in first.log, RESTART_S)
        other = nodes.start(1)
        nodes.wait_ready(first)

        assert answers(first) == of_one_rank
        assert "tp=2: 1 of these ranks are on each node" in first.log
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(RESTART_S) == 0


@pytest.mark.long
def test_two_stages_of_two_ranks_on_two_nodes_give_the_text_of_one_rank(
    spoilt_model: str, of_one_rank: list[Any], tmp_path: Path
) -> None:
    flags = (*FLAGS, "--model_dir", spoilt_model, "--tp", "2", "--pp", "2")
    with nodes_in(tmp_path / "both", 2, *flags) as nodes:
        other, first = nodes.start(1), nodes.start(0)
        nodes.wait_ready(first)

        assert answers(first) == of_one_rank
        assert sorted(other.processes()) == ["ls-worker-2", "ls-worker-3"]  # a stage is on one node
        for server, worker in ((other, "ls-worker-3"), (first, "ls-worker-1")):
            found = answers_despite(first, lambda server=server, worker=worker: kill_worker(server, worker))  # type: ignore[misc]
            assert found == of_one_rank, nodes.logs()


@pytest.mark.long
def test_an_engine_of_a_gateway_may_have_two_nodes(spoilt_model: str, of_one_rank: list[Any], tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = (*FLAGS, "--model_dir", spoilt_model, "--pp", "2", "--listen", address)
    with nodes_in(tmp_path / "engine", 2, *flags) as nodes:
        other, engine = nodes.start(1), nodes.start(0)
        gateway_flags = ("--model_dir", spoilt_model, "--engines", address, "--cluster_keys", str(nodes.keys))
        with running_server(tmp_path / "log", *gateway_flags) as gateway:
            found = answers_despite(gateway, lambda: kill_worker(other, "ls-worker-1"))

            assert found == of_one_rank, nodes.logs()
            assert engine.stop() == 0


@pytest.mark.long
def test_ranks_on_two_nodes_load_the_same_blocks_of_kv(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = Path(save_small_model(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    flags = ("--model_dir", str(folder), "--device", "cpu", "--deterministic", "--kv_ram_gb", "0.1", "--tp", "2")
    with nodes_in(tmp_path / "tiers", 2, *flags, "--max_total_token_num", str(KV_TOKENS)) as nodes:
        _, first = nodes.start(1), nodes.start(0)
        nodes.wait_ready(first)
        expected, _ = ask(first, 0)

        assert ask_after_eviction(first, 0, expected, "a") > 0


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace with the address 10.213.7.2, linked with 10.213.7.1 of this machine."""
    name = f"ls-nodes-{os.getpid()}"
    link = f"ls{os.getpid()}"
    if shutil.which("ip") is None or not ip("netns", "add", name):
        pytest.skip("needs ip netns, and the right to use it")
    try:
        assert ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        assert ip("addr", "add", "10.213.7.1/24", "dev", link)
        assert ip("link", "set", link, "up")
        assert ip("-n", name, "addr", "add", "10.213.7.2/24", "dev", "eth0")
        assert ip("-n", name, "link", "set", "eth0", "up")
        assert ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.mark.long
def test_nodes_with_different_addresses_give_the_text_of_one_rank(
    spoilt_model: str, of_one_rank: list[Any], tmp_path: Path, namespace: str
) -> None:
    flags = (*FLAGS, "--model_dir", spoilt_model, "--pp", "2")
    with nodes_in(tmp_path / "netns", 2, *flags, address="10.213.7.1") as nodes:
        nodes.prefixes[1] = ["ip", "netns", "exec", namespace]
        other, first = nodes.start(1), nodes.start(0)
        nodes.wait_ready(first)

        assert answers(first) == of_one_rank
        ranks = first.processes()["ls-worker"]
        places = {one.laddr.ip for rank in ranks for one in rank.net_connections("tcp") if one.status == "LISTEN"}
        assert places == {"127.0.0.1", "10.213.7.1"}  # the store and gloo

        def cut_cable() -> None:
            assert ip("-n", namespace, "link", "set", "eth0", "down")
            wait_until(lambda: "node 1 is lost" in first.log, RESTART_S)
            wait_until(lambda: "node 0 is lost" in other.log, RESTART_S)
            assert ip("-n", namespace, "link", "set", "eth0", "up")

        assert answers_despite(first, cut_cable) == of_one_rank, nodes.logs()


@pytest.fixture(scope="module")
def replicas(spoilt_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoStages]:
    """Two nodes with a whole engine each."""
    flags = (*FLAGS, "--model_dir", spoilt_model, "--dp", "2", "--cluster_policy", "round_robin")
    with nodes_in(tmp_path_factory.mktemp("replicas"), 2, *flags) as nodes:
        replicas = TwoStages(nodes)
        nodes.wait_ready(replicas.first)
        yield replicas


def test_engines_on_two_nodes_give_the_text_of_one_rank(replicas: TwoStages, of_one_rank: list[Any]) -> None:
    assert answers(replicas.first) == of_one_rank

    assert list(replicas.other.processes()) == ["ls-worker-1"]
    replicas.other.wait_for_log("starting model worker 0 of engine 1")


def test_an_engine_whose_node_is_killed_loses_no_request(replicas: TwoStages, of_one_rank: list[Any]) -> None:
    """Node 1 stays away: all go on in engine 0. When it is back, it serves again."""

    def kill() -> None:
        replicas.other.process.kill()
        replicas.other.process.wait()

    assert answers_despite(replicas.first, kill) == of_one_rank, replicas.nodes.logs()
    assert replicas.first.is_healthy()

    restarts = replicas.first.metrics()["worker_restarts_total"]
    replicas.other = replicas.nodes.start(1)
    wait_until(lambda: replicas.first.metrics()["worker_restarts_total"] > restarts, RESTART_S)
    found = answers_despite(replicas.first, lambda: kill_worker(replicas.other, "ls-worker-1"))

    assert found == of_one_rank, replicas.nodes.logs()


@pytest.mark.long
def test_divided_engines_give_the_text_of_one_rank(spoilt_model: str, of_one_rank: list[Any], tmp_path: Path) -> None:
    flags = (*FLAGS, "--model_dir", spoilt_model, "--dp", "3", "--pp", "2", "--cluster_policy", "round_robin")
    with nodes_in(tmp_path / "divided", 2, *flags) as nodes:
        other, first = nodes.start(1), nodes.start(0)
        nodes.wait_ready(first)

        assert answers(first) == of_one_rank
        assert sorted(other.processes()) == ["ls-worker-1", "ls-worker-3", "ls-worker-5"]
        assert answers_despite(first, lambda: kill_worker(other, "ls-worker-3")) == of_one_rank, nodes.logs()
