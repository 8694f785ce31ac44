"""An HTTP process of a real server is killed or hangs while streams run: another one takes its place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from test.api.event_client import EventClient
from test.api.server import ServerProcess, running_server
from test.waiting import has_ended, wait_until

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"
BODY = {"prompt": [501, 502, 503], "max_tokens": 1000, "ignore_eos": True, "temperature": 0, "stream": True}
SHORT = {"prompt": [501, 502, 503], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
NUM_STREAMS = 4  # at least, for each process
IS_BACK = "a new HTTP process is ready"


def serve(folder: Path, num_http_processes: int) -> Iterator[ServerProcess]:
    """Steps take 10 ms, so that streams of 1,000 tokens outlive a fault."""
    flags = ("--null_worker", "--null_step_ms", "10", "--process_timeout", "6")
    with running_server(folder / "log", *flags, "--httpserver_workers", str(num_http_processes)) as server:
        yield server


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from serve(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from serve(tmp_path_factory.mktemp("two"), 2)


def http_process(server: ServerProcess, name: str) -> psutil.Process:
    (found,) = server.processes()[name]
    return found


def streams_of(processes: list[psutil.Process], server: ServerProcess) -> list[list[EventClient]]:
    """Streams that run, at least NUM_STREAMS for each process: the kernel distributes the connections."""
    found: list[list[EventClient]] = [[] for _ in processes]
    while any(len(streams) < NUM_STREAMS for streams in found):
        client = EventClient(server.url, COMPLETE, BODY)
        client.read(2)
        peers = [{one.raddr.port for one in process.net_connections("tcp") if one.raddr} for process in processes]
        (index,) = (index for index, ports in enumerate(peers) if client.local_port in ports)
        found[index].append(client)
    return found


def text_of(client: EventClient) -> str:
    return "".join(event.json["choices"][0]["text"] for event in client.events if event.data != "[DONE]")


def replace_while_streaming(server: ServerProcess, name: str, signum: signal.Signals) -> None:
    """The streams of one process end, those of the other go on, and nothing of the first ones is left."""
    names = ["ls-httpserver", "ls-httpserver-1"]
    processes = [http_process(server, one) for one in names]
    restarts, generated = server.log.count(IS_BACK), server.metrics()["generation_tokens_total"]
    streams = streams_of(processes, server)
    cut = streams.pop(names.index(name))
    (going_on,) = streams

    http_process(server, name).send_signal(signum)
    wait_until(lambda: server.log.count(IS_BACK) == restarts + 1)
    for client in cut:
        client.read_until_cut()
        assert 2 <= len(client.events) < 1001
    for client in going_on:
        client.read_all()
        assert client.events[-1].data == "[DONE]"

    assert len({text_of(client) for client in going_on}) == 1
    assert all(text_of(going_on[0]).startswith(text_of(client)) for client in cut)
    server.wait_until_idle()
    metrics = server.metrics()
    assert metrics["http_process_restarts_total"] == restarts + 1
    assert metrics["generation_tokens_total"] >= generated + NUM_STREAMS * 1000
    assert len(server.processes()[name]) == 1


def test_the_streams_of_other_http_processes_go_on_when_one_is_killed(two: ServerProcess) -> None:
    replace_while_streaming(two, "ls-httpserver", signal.SIGKILL)


def test_an_http_process_that_hangs_is_replaced_as_one_that_died(two: ServerProcess) -> None:
    replace_while_streaming(two, "ls-httpserver-1", signal.SIGSTOP)


def test_requests_that_come_while_the_only_http_process_is_replaced_wait_for_it(one: ServerProcess) -> None:
    before = one.metrics()
    stream = EventClient(one.url, COMPLETE, BODY)
    stream.read(20)
    process = http_process(one, "ls-httpserver")

    process.kill()
    wait_until(lambda: has_ended(process))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: one.post(COMPLETE, SHORT), range(8)))

    assert [status for status, _ in answers] == [200] * 8
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    stream.read_until_cut()
    assert len(stream.events) < 1001
    one.wait_until_idle()
    after = one.metrics()
    assert {name for name, value in before.items() if name.endswith("_total") and after[name] < value} == set()
    assert after["request_success_total/abort"] == before["request_success_total/abort"] + 1
    assert one.stop() == 0
