"""HAProxy in front of two gateways: clients notice nothing of it, and lose only the streams of a gateway that dies."""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from lightserve.cluster.proxy.haproxy import find_haproxy
from lightserve.cluster.proxy.haproxy_config import ProxySettings
from lightserve.errors import OptionError
from lightserve.links.keys import generate
from test.api.server import RESPONSE_S, START_S, STOP_S, ServerProcess, start_server
from test.api.test_dp import COMPLETE, PROMPT
from test.cluster.tcp_cluster import takes_connections
from test.ports import free_port
from test.waiting import has_ended, wait_until

try:
    find_haproxy()
except OptionError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow

CLI = (sys.executable, "-m", "lightserve.cli.main")
USER, ADMIN = "a-user", "an-admin"
LONG = {"prompt": PROMPT, "max_tokens": 800, "ignore_eos": True, "stream": True}
SHORT = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}


@dataclass
class Front:
    """An engine, two gateways and HAProxy."""

    folder: Path
    engine: ServerProcess
    gateways: list[ServerProcess]
    proxy: ServerProcess

    def start_gateway(self, number: int) -> ServerProcess:
        keys = ("--api_key", USER, "--admin_key", ADMIN, "--cluster_keys", str(self.folder / "keys"))
        flags = ("--engines_file", str(self.folder / "engines"), "--port", "0", *keys)
        return start_server(self.folder / f"gateway-{number}.log", [*CLI, "serve", *flags])

    def use_gateways(self) -> None:
        """Wait until they serve, and tell HAProxy."""
        for gateway in self.gateways:
            wait_until(lambda gateway=gateway: "ready at" in gateway.log or gateway.has_ended, START_S)  # type: ignore[misc]
            wait_until(gateway.is_healthy)
        written = self.folder / "new"
        written.write_text(json.dumps([gateway.url for gateway in self.gateways]))
        written.replace(self.folder / "gateways.json")
        self.wait_for_proxy()
        wait_until(self.proxy.is_healthy)
        wait_until(lambda: {self.gateway_of(stream) for stream in self.streams(2)} == {0, 1})

    def wait_for_proxy(self) -> None:
        wait_until(lambda: "ready at" in self.proxy.log or self.proxy.has_ended)
        assert not self.proxy.has_ended, self.proxy.log

    def stream(self, body: dict[str, Any] = LONG, key: str = USER) -> Stream:
        return Stream(self.proxy.url, body, key)

    def streams(self, count: int) -> list[Stream]:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(lambda _: self.stream(), range(count)))

    def gateway_of(self, stream: Stream) -> int:
        """The gateway that has the request. Ends the stream."""
        name = stream.request_id
        stream.close()
        found = [number for number, gateway in enumerate(self.gateways) if name in listed(gateway)]
        return found[0] if len(found) == 1 else -1

    def running(self, gateway: int = 0) -> float:
        """Requests of all gateways in the engine, as one gateway says."""
        return metrics(self.gateways[gateway])["num_requests_running"]

    def stop(self) -> None:
        for process in (self.proxy, *self.gateways, self.engine):
            if not process.has_ended:
                process.process.kill()
                process.process.wait(STOP_S)


class Stream:
    """A streamed response whose first event has come."""

    def __init__(self, url: str, body: dict[str, Any], key: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection.request("POST", COMPLETE, json.dumps(body), headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self.request_id = self._response.headers["X-Request-Id"]
        self._response.readline()

    def rest(self) -> str:
        """How it ends: the last event, or "lost"."""
        last = b""
        try:
            while line := self._response.readline():
                last = line.strip() or last
        except (http.client.HTTPException, OSError):
            return "lost"
        return last.decode() if last == b"data: [DONE]" else "lost"

    def close(self) -> None:
        self._response.close()  # it has the socket too
        self._connection.close()


def ask(
    server: ServerProcess, path: str, body: dict[str, Any] | None = None, key: str = USER
) -> tuple[int, Message, Any]:
    headers = {"Authorization": f"Bearer {key}"} | ({} if body is None else {"Content-Type": "application/json"})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
            return response.status, response.headers, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def listed(server: ServerProcess) -> set[str]:
    found = ask(server, "/debug/requests?limit=1000", key=ADMIN)[2]
    return {request["request_id"] for request in found["requests"]}


def metrics(server: ServerProcess) -> dict[str, float]:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {USER}"})
    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.removeprefix("lightserve_").rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in pairs}


def start_proxy(folder: Path) -> ServerProcess:
    command = [sys.executable, "-m", "lightserve.cluster.proxy.main", str(os.getpid()), str(folder)]
    return start_server(folder / "proxy.log", command)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    generate(folder / "keys")
    address = f"tcp://127.0.0.1:{free_port()}"
    (folder / "engines").write_text(address)
    null = ("--null_worker", "--null_step_ms", "10", "--max_total_token_num", "200000", "--running_max_req_size", "16")
    limits = ("--max_queue_size", "16", "--listen", address, "--cluster_keys", str(folder / "keys"))
    engine = start_server(folder / "engine.log", [*CLI, "engine", *null, *limits])
    settings = ProxySettings("127.0.0.1", 0, 2, has_keys=True)
    (folder / "proxy.json").write_bytes(msgspec.json.encode(settings))
    (folder / "gateways.json").write_text('["", ""]')
    found = Front(folder, engine, [], start_proxy(folder))
    try:
        found.gateways = [found.start_gateway(number) for number in range(2)]
        found.use_gateways()
        yield found
    finally:
        found.stop()


def test_streams_are_shared_by_the_gateways_and_come_token_by_token(front: Front) -> None:
    streams = front.streams(8)

    wait_until(lambda: front.running() == 8)  # none has ended, and all have their first event
    assert {front.gateway_of(stream) for stream in streams} == {0, 1}
    wait_until(lambda: front.running() == 0)  # a client that leaves ends its request


def test_a_killed_gateway_costs_its_own_streams_and_nothing_else(front: Front) -> None:
    streams, counted = front.streams(8), metrics(front.gateways[0])["request_failed_total"]

    killed = front.gateways[1].url
    front.gateways[1].process.kill()
    with ThreadPoolExecutor(8) as threads:
        ends = [threads.submit(stream.rest) for stream in streams]
        wait_until(lambda: not takes_connections(killed))  # what it has accepted before is lost too
        found = [ask(front.proxy, COMPLETE, SHORT)[0] for _ in range(20)]
        lost = [end.result() for end in ends].count("lost")

    assert found == [200] * 20
    assert lost == 4  # HAProxy sends a request to the gateway with fewer connections
    wait_until(lambda: front.running() == 0)  # the engine has aborted those of the killed gateway
    assert metrics(front.gateways[0])["request_failed_total"] == counted
    front.gateways[1].process.wait(STOP_S)
    front.gateways[1] = front.start_gateway(1)
    front.use_gateways()


def test_an_abort_reaches_every_gateway(front: Front) -> None:
    streams = front.streams(4)
    wait_until(lambda: front.running() == 4)

    assert ask(front.proxy, "/abort_request", {"request_id": streams[0].request_id})[0] == 403  # not for users
    for stream in streams:
        assert ask(front.proxy, "/abort_request", {"request_id": stream.request_id}, ADMIN)[0] == 200

    wait_until(lambda: front.running() == 0)
    assert {stream.request_id for stream in streams} <= listed(front.proxy)
    name = streams[0].request_id
    assert ask(front.proxy, f"/debug/requests/{name}", key=ADMIN)[2]["sequences"][0]["request_id"] == name
    assert ask(front.proxy, "/debug/requests/none", key=ADMIN)[0] == 404


def test_errors_of_gateways_come_through(front: Front) -> None:
    assert ask(front.proxy, COMPLETE, SHORT, key="wrong")[0] == 401
    status, _, body = ask(front.proxy, COMPLETE, SHORT | {"temperature": "hot"})
    assert (status, body["error"]["param"]) == (400, "temperature")
    streams = front.streams(16)
    with ThreadPoolExecutor(24) as threads:
        more = [threads.submit(ask, front.proxy, COMPLETE, SHORT) for _ in range(24)]
        wait_until(lambda: any(one.done() for one in more))
        for stream in streams:
            stream.close()
        answers = [one.result() for one in more]

    refused = [headers for status, headers, _ in answers if status == 429]
    assert refused
    assert all("Retry-After" in headers for headers in refused)
    assert {status for status, *_ in answers} <= {200, 429}


def test_metrics_come_from_one_gateway_and_stored_responses_from_the_one_that_has_them(front: Front) -> None:
    first = metrics(front.gateways[0])

    assert metrics(front.proxy).keys() == first.keys()
    for _ in range(4):
        response = ask(front.proxy, "/v1/responses", {"input": "Hello", "max_output_tokens": 16})[2]
        assert ask(front.proxy, f"/v1/responses/{response['id']}")[2]["id"] == response["id"]


def test_without_an_engine_the_gateways_answer_themselves(front: Front) -> None:
    """It ends the engine."""
    front.engine.process.kill()
    front.engine.process.wait(STOP_S)

    def says(path: str, body: dict[str, Any] | None = None) -> Callable[[], bool]:
        return lambda: "engine" in ask(front.proxy, path, body)[2].get("error", {}).get("message", "")

    wait_until(says("/health"))
    waiting = SHORT | {"timeout": 0.5}
    assert ask(front.proxy, COMPLETE, waiting)[0] == 503
    assert says(COMPLETE, waiting)()


def test_if_haproxy_dies_its_process_ends_and_says_so(front: Front) -> None:
    """Last. The actor on Ray starts it again."""
    [haproxy] = front.proxy.processes()["haproxy"]

    haproxy.kill()

    assert front.proxy.process.wait(STOP_S) == 1
    assert "HAProxy ended with exit code -9" in front.proxy.log


def test_haproxy_ends_with_its_process(front: Front) -> None:
    front.proxy = start_proxy(front.folder)
    front.wait_for_proxy()
    [haproxy] = front.proxy.processes()["haproxy"]

    front.proxy.process.kill()

    wait_until(lambda: has_ended(haproxy))
