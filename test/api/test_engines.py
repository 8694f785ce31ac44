"""Engines and a gateway as processes of their own, over TCP: the same text as one server, whatever breaks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightserve.links.keys import generate
from test.api.server import START_S, STOP_S, ServerProcess, start_server
from test.api.test_dp import BACK_S, COMPLETE, KV_TOKENS, PROMPT, ask_while, bodies, expected, get, model, moved, one
from test.api.test_restart import Clients, clients_of
from test.links.test_gateway_link import send_bytes
from test.ports import free_port
from test.waiting import wait_until

pytestmark = pytest.mark.slow

__all__ = ["expected", "model", "one"]  # fixtures
CLI = (sys.executable, "-m", "lightserve.cli.main")


@dataclass
class Cluster:
    folder: Path
    model: Path
    addresses: list[str]
    engines: list[ServerProcess]
    gateway: ServerProcess

    def start_engine(self, number: int) -> ServerProcess:
        flags = ("--deterministic", "--max_total_token_num", KV_TOKENS, "--listen", self.addresses[number])
        command = [*CLI, "engine", str(self.model), *flags, "--cluster_keys", str(self.folder / "keys")]
        return start_server(self.folder / f"engine-{number}.log", command)

    def wait_until_all_serve(self) -> None:
        wait_until(lambda: serving(self.gateway) == len(self.engines), BACK_S)

    def stop(self) -> None:
        for process in (*self.engines, self.gateway):
            if not process.has_ended:
                process.process.kill()  # its child processes exit too
                process.process.wait(STOP_S)


def serving(gateway: ServerProcess) -> int:
    """Engines that generate tokens."""
    lines = gateway.metrics_text().splitlines()
    return sum(line.startswith("lightserve_dp_engine_serving{") and line.endswith(" 1.0") for line in lines)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A gateway that starts before its engines. Its model folder has no weights."""
    folder = tmp_path_factory.mktemp("cluster")
    generate(folder / "keys")
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    without_weights = folder / "model"
    without_weights.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (without_weights / file.name).write_bytes(file.read_bytes())
    (folder / "engines").write_text("\n".join(addresses))
    flags = ["--engines_file", str(folder / "engines"), "--cluster_keys", str(folder / "keys"), "--port", "0"]
    gateway = start_server(folder / "gateway.log", [*CLI, "serve", str(without_weights), *flags])
    cluster = Cluster(folder, model, addresses, [], gateway)
    try:
        cluster.engines = [cluster.start_engine(number) for number in range(2)]
        wait_until(lambda: "ready at" in gateway.log or gateway.has_ended, START_S)
        assert not gateway.has_ended, gateway.log
        cluster.wait_until_all_serve()
        yield cluster
    finally:
        cluster.stop()


def test_two_engines_over_tcp_give_the_same_text_as_one_server(cluster: Cluster, expected: list[Any]) -> None:
    with clients_of(cluster.gateway) as clients:
        found = [answer.result() for answer in clients.ask(bodies())]

    assert found == expected
    assert set(cluster.gateway.processes()) == {"ls-dispatcher", "ls-detokenizer", "ls-httpserver", "ls-grammar"}
    assert set(cluster.engines[0].processes()) == {"ls-router", "ls-worker"}
    listed = get(cluster.gateway, "/debug/requests")["requests"]
    assert len(listed) >= len(bodies())
    assert cluster.gateway.is_healthy()


def test_strangers_change_nothing_while_streams_run(cluster: Cluster, expected: list[Any]) -> None:
    def knock(_: Clients) -> None:
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000):
            send_bytes(cluster.addresses[0], sent)

    assert ask_while(cluster.gateway, knock) == expected


def test_the_streams_of_a_killed_engine_go_on_with_the_same_text_and_it_comes_back(
    cluster: Cluster,
    expected: list[Any],
) -> None:
    before = moved(cluster.gateway)

    def kill(_: Clients) -> None:
        cluster.engines[1].process.kill()  # the launcher: its children exit with it

    found = ask_while(cluster.gateway, kill)

    assert found == expected
    wait_until(lambda: moved(cluster.gateway) > before)
    cluster.engines[1].process.wait(STOP_S)
    cluster.engines[1] = cluster.start_engine(1)
    cluster.wait_until_all_serve()


@pytest.mark.long  # the launcher's tests and those of --dp have the parts of it
def test_a_killed_router_is_restarted_and_joins_again(cluster: Cluster, expected: list[Any]) -> None:
    def kill(_: Clients) -> None:
        cluster.engines[0].processes()["ls-router"][0].send_signal(signal.SIGKILL)

    found = ask_while(cluster.gateway, kill)

    assert found == expected
    wait_until(lambda: "engine 0 is back" in cluster.engines[0].log, BACK_S)
    cluster.wait_until_all_serve()


def test_the_streams_of_a_stopped_engine_go_on_after_two_seconds_without_a_heartbeat(
    cluster: Cluster,
    expected: list[Any],
) -> None:
    before, router = moved(cluster.gateway), cluster.engines[1].processes()["ls-router"][0]

    def stop(_: Clients) -> None:
        router.send_signal(signal.SIGSTOP)
        wait_until(lambda: moved(cluster.gateway) > before)

    try:
        found = ask_while(cluster.gateway, stop)
    finally:
        router.send_signal(signal.SIGCONT)

    assert found == expected
    cluster.gateway.wait_for_log("no heartbeat for 2 s")
    cluster.wait_until_all_serve()
    wait_until(lambda: "requests aborted" in cluster.engines[1].log)


def test_an_engine_that_gets_sigterm_finishes_its_streams_and_then_ends(cluster: Cluster, expected: list[Any]) -> None:
    before = moved(cluster.gateway)

    found = ask_while(cluster.gateway, lambda _: cluster.engines[1].process.terminate())

    assert found == expected
    assert cluster.engines[1].process.wait(STOP_S) == 0
    assert moved(cluster.gateway) == before
    cluster.gateway.wait_for_log("engine 1 drains")
    cluster.engines[1] = cluster.start_engine(1)
    cluster.wait_until_all_serve()


def test_a_gateway_with_other_keys_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    generate(tmp_path / "keys")
    (tmp_path / "keys" / "engines.allowed").write_bytes((cluster.folder / "keys" / "engines.allowed").read_bytes())
    flags = ["--engines", cluster.addresses[1], "--cluster_keys", str(tmp_path / "keys"), "--port", "0"]
    stranger = start_server(tmp_path / "log", [*CLI, "serve", str(cluster.folder / "model"), *flags])
    try:
        wait_until(lambda: "the engine does not accept this gateway's key" in stranger.log, START_S)
        wait_until(lambda: "is not in gateways.allowed" in cluster.engines[1].log)
        assert "ready at" not in stranger.log
    finally:
        stranger.process.terminate()
        stranger.process.wait(STOP_S)


def test_without_engines_requests_wait_until_their_deadline(cluster: Cluster) -> None:
    for engine in cluster.engines:
        engine.process.terminate()
    for engine in cluster.engines:
        assert engine.process.wait(STOP_S) == 0
    wait_until(lambda: not cluster.gateway.is_healthy())

    status, response = cluster.gateway.post(COMPLETE, {"prompt": PROMPT, "max_tokens": 4, "timeout": 0.5})

    assert status == 503
    assert "no engine could take the request within its timeout of 0.5 s" in response["error"]["message"]
    assert "no engine of --engines_file can be reached" in get(cluster.gateway, "/get_server_info")["unhealthy_reason"]
    assert cluster.gateway.stop() == 0
