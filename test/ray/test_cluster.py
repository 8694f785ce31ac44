"""Replicas on three simulated Ray nodes: deploy, kill a replica, kill a node, and always the same text."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.serve", reason="the extra ray is not installed")  # Ray alone lacks Serve

import ray
from ray import serve

from lightserve.ray import app, cluster as ray_cluster
from lightserve.ray.messages import ReplicaGroup, ReplicaStatus
from lightserve.ray.serve_app import parse
from test.api.server import MODULE, ServerProcess, start_server
from test.api.test_disaggregation import PROMPT_TOKENS, bodies as long_bodies
from test.api.test_dp import COMPLETE, bodies, expected, model
from test.api.test_restart import Clients, clients_of
from test.cluster.tcp_cluster import takes_connections
from test.ports import free_port
from test.ray.ray_nodes import CHANGE_S, COMMAND_S, Gateway, RayNodes, is_up, ray_nodes, status, wait_for, wait_serving
from test.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

__all__ = ["expected", "model"]  # fixtures
STREAMS, STREAMS_LONG = 30, 200
FLAGS = (
    *("--deterministic", "--max_total_token_num", "8192", "--port", "0", "--device", "cpu", "--drain_timeout", "300"),
    *("--cpus_per_replica", "0.6", "--wait_s", str(COMMAND_S)),  # a node has room for one
)
OTHER_CPUS = "0.2"  # of a replica of other deployments: two have room beside it
SEVERAL = ("--name", "several", "--gateways", "2", "--cpus_per_replica", OTHER_CPUS)
ROLES = ("--roles", "prefill=1,decode=2", "--min_remote_prefill_tokens", "128")
PREFIXES, PER_PREFIX, PREFIX_LEN, SUFFIX_LEN = 12, 16, 512, 8  # round_robin finds 87 % of one server's hits


@pytest.fixture(scope="module")
def starting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server, which starts while Ray's nodes do."""
    flags = ("--model_dir", str(model), "--deterministic", "--max_total_token_num", "8192", "--port", "0")
    server = start_server(tmp_path_factory.mktemp("one") / "log", [sys.executable, *MODULE, *flags])
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope="module")
def one(starting: ServerProcess) -> ServerProcess:
    wait_until(lambda: "ready at" in starting.log or starting.has_ended, CHANGE_S)
    return starting


@pytest.fixture(scope="module")
def nodes(starting: ServerProcess) -> Iterator[RayNodes]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_nodes(Path(folder), 2) as found:
        yield found


@pytest.fixture(scope="module")
def deployed(nodes: RayNodes, model: Path) -> Iterator[Gateway]:
    printed = nodes.run("deploy", str(model), "--replicas", "3", *FLAGS)
    yield Gateway(printed.split()[0])
    nodes.call("undeploy")
    assert not ray_cluster.actor_names("lightserve/")


@pytest.fixture
def streams(request: pytest.FixtureRequest) -> int:
    return STREAMS_LONG if request.config.getoption("--long") else STREAMS


@pytest.fixture
def fewer(request: pytest.FixtureRequest) -> int:
    """Replicas of the tests that start every one of them anew."""
    return 3 if request.config.getoption("--long") else 2


def ask_while(gateway: Gateway, streams: int, break_it: Callable[[], Any]) -> list[Any]:
    """The answers to many requests at once. Something breaks in the middle of them."""
    kinds = bodies()
    with ThreadPoolExecutor(streams) as threads:
        clients = Clients(gateway, threads)
        asked = clients.ask([kinds[index % len(kinds)] for index in range(streams)])
        wait_until(lambda: clients.events > 10 * streams or all(answer.done() for answer in asked), CHANGE_S)
        break_it()
        return [answer.result() for answer in asked]


def repeated(expected: list[Any], count: int) -> list[Any]:
    return [expected[index % len(expected)] for index in range(count)]


def moved(gateway: Gateway) -> float:
    return gateway.metrics()["dp_requests_moved_total"]


def test_deploy_places_a_replica_on_each_node_and_all_serve_the_same_text(
    nodes: RayNodes, deployed: Gateway, expected: list[Any], streams: int
) -> None:
    found = status()
    count = streams if streams == STREAMS_LONG else len(expected)

    assert len({one.node for one in found.replicas}) == 3
    assert found.gateway.process.address == deployed.url
    assert ask_while(deployed, count, lambda: None) == repeated(expected, count)
    shown = nodes.call("status")
    assert "3 of 3 replicas serve" in shown
    assert shown.count(" serving ") == 3 + 1
    wrong = nodes.call("deploy", "/no/such/model", "--name", "wrong", *FLAGS, code=2)
    assert "the gateway does not start: exit code 2: lightserve: " in wrong
    assert "no/such/model" in wrong
    assert not ray_cluster.actor_names("wrong/")
    assert "no deployment 'wrong'" in nodes.call("status", "--name", "wrong", code=2)


def test_a_killed_replica_loses_no_stream_and_ray_restarts_it(
    deployed: Gateway, expected: list[Any], streams: int
) -> None:
    before, (first, *_) = moved(deployed), status().replicas

    def kill() -> None:
        ray.kill(ray_cluster.get_actor(f"lightserve/{first.replica}"), no_restart=False)
        wait_for(lambda: moved(deployed) > before)

    found = ask_while(deployed, streams, kill)

    assert found == repeated(expected, streams)
    wait_for(lambda: status().replicas[0].process.address != first.process.address)
    assert status().replicas[0].replica == first.replica
    wait_serving(3)


def test_a_killed_node_loses_no_stream_and_a_new_node_takes_its_replica(
    nodes: RayNodes, deployed: Gateway, expected: list[Any], streams: int
) -> None:
    before, lost = moved(deployed), next(one for one in status().replicas if one.node in nodes.others)

    def kill() -> None:
        nodes.kill(lost.node)
        wait_for(lambda: moved(deployed) > before)
        nodes.add()

    found = ask_while(deployed, streams, kill)

    assert found == repeated(expected, streams)
    wait_for(lambda: lost.node not in {one.node for one in status().replicas})
    assert len({one.node for one in wait_serving(3).replicas}) == 3


def prefix_hits(server: ServerProcess) -> float:
    """The share of prompt tokens that were cached: several clients at once, and any client asks for any prefix."""
    choice = random.Random(5)
    prefixes = [[choice.randrange(40) for _ in range(PREFIX_LEN)] for _ in range(PREFIXES)]
    suffixes = [[choice.randrange(40) for _ in range(SUFFIX_LEN)] for _ in range(PER_PREFIX)]
    prompts = [prefix + suffix for suffix in suffixes for prefix in prefixes]

    def ask(prompt: list[int]) -> int:
        return server.post(COMPLETE, {"prompt": prompt, "max_tokens": 8, "cache_salt": "hits"})[0]

    before = server.settled_metrics()
    with ThreadPoolExecutor(PREFIXES) as threads:
        assert set(threads.map(ask, prompts)) == {200}
    after = server.settled_metrics()
    hits, queries = (after[name] - before[name] for name in ("prefix_cache_hits_total", "prefix_cache_queries_total"))
    return hits / queries


def test_three_replicas_find_nearly_as_many_prefixes_cached_as_one_server(
    deployed: Gateway, one: ServerProcess
) -> None:
    with ThreadPoolExecutor(2) as threads:  # both wait for metrics most of the time
        alone, together = threads.map(prefix_hits, (one, deployed))

    assert alone > 0.8
    assert together >= 0.9 * alone


@pytest.mark.long
def test_a_drained_node_loses_no_stream_and_gets_no_replica_until_it_is_used_again(
    nodes: RayNodes, deployed: Gateway, expected: list[Any], streams: int
) -> None:
    before, drained = moved(deployed), status().replicas[0]

    found = ask_while(deployed, streams, lambda: nodes.call("drain", drained.node[:12]))

    assert found == repeated(expected, streams)
    wait_serving(2)
    assert moved(deployed) == before
    assert "is drained" in nodes.call("status")
    assert drained.node not in {replica.node for replica in status().replicas}
    nodes.call("drain", drained.node, "--undo")
    assert drained.node in {replica.node for replica in wait_serving(3).replicas}
    assert "neither a replica nor" in nodes.call("drain", "zzz", code=2)


@pytest.mark.long
def test_new_flags_replace_every_replica_and_no_stream_notices(
    nodes: RayNodes, deployed: Gateway, model: Path, expected: list[Any], streams: int, fewer: int
) -> None:
    before, old = moved(deployed), {replica.replica for replica in status().replicas}
    new = ("deploy", str(model), "--replicas", str(fewer), *FLAGS, "--running_max_req_size", "100")

    found = ask_while(deployed, streams, lambda: nodes.call(*new))

    assert found == repeated(expected, streams)
    assert moved(deployed) == before
    now = wait_serving(fewer)
    assert now.version == 2
    assert not old & {replica.replica for replica in now.replicas}
    other = nodes.call(*new, "--data_type", "bfloat16", code=2)
    assert "data_type=None, not bfloat16: replicas of both cannot serve together" in other
    assert "no_web: these belong to the gateway" in nodes.call(*new, "--no_web", code=2)


def test_a_killed_controller_finds_its_replicas_again(deployed: Gateway) -> None:
    before, joined = status(), deployed.metrics()["dp_engine_restarts_total"]
    controller: Any = ray_cluster.get_actor("lightserve/controller")

    old = controllers()

    ray.kill(controller, no_restart=False)
    wait_for(lambda: bool(controllers()) and not old & controllers() and _answers(controller))

    after = wait_serving(len(before.replicas))
    assert after.version == before.version
    assert {one.process.address for one in after.replicas} == {one.process.address for one in before.replicas}
    assert is_up(deployed.url)
    assert deployed.metrics()["dp_engine_restarts_total"] == joined


def controllers() -> set[int]:
    """Processes. Ray writes what an actor is into its command line."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is a zombie
            if "ray::Controller" in " ".join(process.cmdline() or [process.name()]):
                found.add(process.pid)
    return found


def _answers(actor: Any) -> bool:
    try:
        ray.get(actor.status.remote(), timeout=10)
    except (ray.exceptions.RayError, TimeoutError):
        return False
    return True


def test_replicas_come_with_the_load_and_go_without_it(
    nodes: RayNodes, deployed: Gateway, model: Path, fewer: int
) -> None:
    def scale(down_s: str) -> None:
        limits = ("--replicas", f"1:{fewer}", "--target_queue", "0.5", "--scale_down_s", down_s, "--wait_s", "0")
        nodes.call("deploy", str(model), *FLAGS, *limits)

    def ask(seed: int) -> int:
        """Again and again. Twelve of them fill the KV memory of a replica. One goes on while others start."""
        body = {"prompt": [seed] * 600, "max_tokens": 80, "ignore_eos": True, "seed": seed}
        is_over = have_come if seed == 0 else are_wanted
        while not is_over.is_set():
            code, answer = deployed.post(COMPLETE, body)
            assert (code, answer["usage"]["completion_tokens"]) == (200, 80)
        return 1

    have_come, are_wanted = threading.Event(), threading.Event()
    scale(down_s="1")
    wait_serving(1)  # there is no load
    scale(down_s="600")
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(ask, seed) for seed in range(16)]
        try:
            wait_for(lambda: status().wanted == fewer)
            are_wanted.set()
            wait_serving(fewer)
        finally:
            are_wanted.set()
            have_come.set()
        assert sum(one.result() for one in asked) == 16

    scale(down_s="1")
    wait_serving(1)


@pytest.fixture(scope="module")
def several(nodes: RayNodes, deployed: Gateway, model: Path) -> Iterator[Gateway]:
    """Two gateways, and replicas with roles."""
    printed = nodes.call("deploy", str(model), *ROLES, *FLAGS, *SEVERAL)
    found = Gateway(printed.split()[0])
    yield found
    nodes.call("undeploy", "--name", "several")
    assert not ray_cluster.actor_names("several/")
    assert not groups("several/")
    wait_until(lambda: not is_up(found.url))


def test_several_gateways_are_one_server_for_clients(nodes: RayNodes, several: Gateway, expected: list[Any]) -> None:
    """HAProxy is in front of them. One that is killed costs nobody else anything."""
    found = status("several")

    assert len({one.node for one in found.gateways}) == 2
    assert several.url not in {one.process.address for one in found.gateways}
    assert ask_while(several, len(expected), lambda: None) == expected
    killed = found.gateways[1].process
    ray.kill(ray_cluster.get_actor("several/gateway-1"), no_restart=False)
    wait_until(lambda: not takes_connections(killed.address))
    answers = [several.post(COMPLETE, {"prompt": [1, 2, 3], "max_tokens": 4})[0] for _ in range(10)]
    assert answers == [200] * 10
    wait_for(lambda: status("several").gateways[1].process.address not in ("", killed.address))
    assert status("several").gateway.process.address == several.url
    assert "gateway 1 " in nodes.call("status", "--name", "several")


def ask_long(round_: int, *servers: ServerProcess) -> list[list[Any]]:
    """The answers of each server to long prompts, which no earlier round had."""

    def ask(server: ServerProcess) -> list[Any]:
        with clients_of(server) as clients:
            return [answer.result() for answer in clients.ask(long_bodies(round_)[::3])]

    with ThreadPoolExecutor(len(servers)) as threads:
        return list(threads.map(ask, servers))


def received(gateway: Gateway) -> float:
    return gateway.settled_metrics()["kv_transfer_received_tokens_total"]


def roles_of(name: str) -> list[str]:
    return sorted(replica.role for replica in status(name).replicas)


def test_a_prefill_replica_computes_the_prompts_of_decode_replicas_and_the_text_is_that_of_one_server(
    nodes: RayNodes, several: Gateway, one: ServerProcess
) -> None:
    before = several.settled_metrics()

    found, expected = ask_long(0, several, one)

    assert found == expected
    after = several.settled_metrics()
    sent, got = (
        after[name] - before[name] for name in ("kv_transfer_sent_tokens_total", "kv_transfer_received_tokens_total")
    )
    assert sent == got >= PROMPT_TOKENS // 64 * 64
    assert after["kv_transfer_given_up_tokens_total"] == after["kv_transfer_recomputed_tokens_total"] == 0
    assert roles_of("several") == ["decode", "decode", "prefill"]
    shown = nodes.call("status", "--name", "several")
    assert "1 of 1 prefill and 2 of 2 decode replicas serve" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("replica-")].count("prefill") == 1


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
def test_a_killed_replica_comes_back_with_its_role_and_loses_no_answer(
    several: Gateway, one: ServerProcess, role: str
) -> None:
    first = 1 if role == "prefill" else 4
    killed = next(replica for replica in status("several").replicas if replica.role == role)

    def now() -> ReplicaStatus:
        return next(replica for replica in status("several").replicas if replica.replica == killed.replica)

    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask_long, first, several, one)]
        wait_until(lambda: several.metrics()["num_requests_running"] > 0 or asked[0].done(), CHANGE_S)
        ray.kill(ray_cluster.get_actor(f"several/{killed.replica}"), no_restart=False)
        asked.append(threads.submit(ask_long, first + 1, several, one))
        answers = [answer.result() for answer in asked]

    assert [found for found, _ in answers] == [expected for _, expected in answers]
    wait_for(lambda: now().takes_requests and now().process.address != killed.process.address)
    assert now().role == role
    assert roles_of("several") == ["decode", "decode", "prefill"]
    before = received(several)
    found, expected = ask_long(first + 2, several, one)
    assert found == expected
    assert received(several) > before


@pytest.mark.long
def test_new_flags_replace_replicas_of_every_role(
    nodes: RayNodes, several: Gateway, one: ServerProcess, model: Path
) -> None:
    old = {replica.replica for replica in status("several").replicas}

    with ThreadPoolExecutor(1) as threads:
        flags = ("--running_max_req_size", "100")
        deployed = threads.submit(nodes.run, "deploy", str(model), *ROLES, *FLAGS, *SEVERAL, *flags)
        while not deployed.done():
            found, expected = ask_long(7, several, one)
            assert found == expected
        printed = deployed.result()

    assert "serves with 1 prefill and 2 decode replicas" in printed
    assert not old & {replica.replica for replica in status("several").replicas}
    assert roles_of("several") == ["decode", "decode", "prefill"]
    drained = next(replica.replica for replica in status("several").replicas if replica.role == "prefill")
    nodes.call("drain", drained, "--name", "several")
    wait_for(lambda: drained not in {replica.replica for replica in wait_serving(3, "several").replicas})
    assert roles_of("several") == ["decode", "decode", "prefill"]


def test_a_dry_run_prints_the_node_of_each_role(nodes: RayNodes, model: Path) -> None:
    roles = ("--roles", "prefill=1:2,decode=1", "--name", "planned", "--cpus_per_replica", "0.01")

    found = nodes.call("deploy", str(model), *FLAGS, *roles, "--dry_run").splitlines()

    assert [line.partition(":")[0] for line in found] == ["gateway", "prefill replica 0", "decode replica 1"]
    assert not ray_cluster.actor_names("planned/")
    wrong = nodes.call("deploy", str(model), *FLAGS, *roles, "--replicas", "2", code=2)
    assert "replicas and roles exclude each other" in wrong


def groups(prefix: str) -> list[str]:
    """Placement groups that reserve something."""
    found = ray.util.placement_group_table().values()
    return [group["name"] for group in found if group["name"].startswith(prefix) and group["state"] != "REMOVED"]


class Placed:
    """An actor in the place of a gateway's."""

    def __init__(self, raw: bytes) -> None:
        pass

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


@pytest.mark.long
def test_gateways_go_to_a_node_that_has_just_joined(nodes: RayNodes) -> None:
    """Most other nodes have not heard of it. Ray's soft affinity to the node placed 7 of 9 elsewhere."""
    before, names = node_ids(), [f"placed/{number}" for number in range(3)]

    def start_on_new_node() -> tuple[str, list[Any]]:
        wait_until(lambda: bool(node_ids() - before), CHANGE_S)
        (new,) = node_ids() - before
        return new, [ray_cluster.start_gateway(Placed, name, b"", new) for name in names]

    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(start_on_new_node)
        nodes.add()
        new, actors = started.result()
    found = ray.get([actor.node.remote() for actor in actors], timeout=CHANGE_S)
    for name, actor in zip(names, actors, strict=True):
        ray_cluster.end_actor(name, actor)
    nodes.kill(new)

    assert found == [new] * len(names)
    assert not groups("placed/")


def node_ids() -> set[str]:
    return {node.id for node in ray_cluster.nodes()}


@pytest.mark.long
def test_a_deployment_without_room_says_what_is_missing(nodes: RayNodes, model: Path) -> None:
    large = ("--name", "large", "--cpus_per_replica", "4", "--wait_s", "30")

    found = nodes.call("deploy", str(model), *FLAGS, *large, code=2)
    shown = nodes.call("status", "--name", "large")
    nodes.call("undeploy", "--name", "large")

    missing = "no node has 4 CPU: a replica runs on one node, and the largest ones have 1 CPU"
    assert f"after 30 s 0 of 1 replicas serve: {missing}" in found
    assert missing in shown


def test_ray_serve_takes_the_flags_of_deploy() -> None:
    own = {"name": "d", "replicas": "1:4", "gateways": "2", "target_queue": "2", "scale_down_s": "5"}
    config, found = parse(own | {"model_dir": "m", "cpus_per_replica": "0.5", "deterministic": "true"})

    assert (config.worker.model_dir, config.worker.deterministic) == ("m", True)
    assert (found.name, found.groups, found.num_gateways) == ("d", [ReplicaGroup(1, 4)], 2)
    assert (found.target_queue, found.scale_down_s) == (2.0, 5.0)
    _, found = parse({"model_dir": "m", "roles": "prefill=1:2,decode=2"})
    assert found.groups == [ReplicaGroup(1, 2, "prefill"), ReplicaGroup(2, 2, "decode")]


@pytest.mark.long
def test_ray_serve_makes_a_deployment_and_ends_it(nodes: RayNodes, deployed: Gateway, model: Path) -> None:
    """Its port shows the state, and sends clients to the gateway."""
    flags = {"model_dir": str(model), "max_total_token_num": "2048", "port": "0", "device": "cpu", "name": "served"}
    port = free_port()
    serve.start(http_options={"port": port})
    try:
        serve.run(app(flags | {"replicas": "1", "cpus_per_replica": OTHER_CPUS}), name="served")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as response:
            found = json.load(response)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models")
        with urllib.request.urlopen(request) as response:  # urllib follows the redirect
            url, listed = response.url, json.load(response)
        assert [one["takes_requests"] for one in found["replicas"]] == [True]
        assert url == found["gateway"]["process"]["address"] + "/v1/models"
        assert url != deployed.url + "/v1/models"
        assert listed["data"]
    finally:
        serve.shutdown()
    wait_for(lambda: not ray_cluster.actor_names("served/"))
