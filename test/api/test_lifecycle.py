"""Start and shutdown of the server with requests in flight. A null worker is enough for this."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from test.api.server import RESPONSE_S, STOP_S, ServerProcess, running_server
from test.waiting import has_ended, wait_until

STEP = ("--null_worker", "--null_step_ms", "20")
ROLES = {"ls-worker": "model worker 0", "ls-router": "router", "ls-detokenizer": "detokenizer"}


class Stream:
    """A streamed response in flight."""

    def __init__(self, url: str, tokens: int) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
        body = {"prompt": "Hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def first_event(self) -> bytes:
        return self._response.readline()

    def rest(self) -> bytes:
        return self._response.read()

    def leave(self) -> None:
        self._connection.close()


@contextmanager
def streaming(log: Path, *flags: str, tokens: int = 8000) -> Iterator[tuple[ServerProcess, list[Stream]]]:
    """A server with four running streams."""
    with running_server(log, *STEP, *flags) as server:
        streams = [Stream(server.url, tokens) for _ in range(4)]
        for stream in streams:
            event = stream.first_event()
            assert event.startswith(b"data: "), (stream.status, event, server.log)
        yield server, streams


def gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: all(has_ended(process) for process in processes)


def family(server: ServerProcess) -> list[psutil.Process]:
    return [child for children in server.processes().values() for child in children]


def gauge(server: ServerProcess, name: str) -> float:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"lightserve_{name}{{"))


def test_sigterm_finishes_running_requests_refuses_new_ones_and_exits_with_0(tmp_path: Path) -> None:
    with streaming(tmp_path / "log", tokens=300) as (server, streams):
        children = family(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: Stream(server.url, 1).status == 503)  # the word must get around first

        ends = [stream.rest() for stream in streams]

        assert "waiting up to 30 s" in server.log
        assert all(end.endswith(b"data: [DONE]\n\n") and b"error" not in end for end in ends)
        assert server.process.wait(STOP_S) == 0
        wait_until(gone(children))


def test_requests_that_take_too_long_end_with_an_error_when_draining(tmp_path: Path) -> None:
    with streaming(tmp_path / "log", "--drain_timeout", "0.5") as (server, streams):
        server.process.send_signal(signal.SIGTERM)

        ends = [stream.rest() for stream in streams]

        assert all(b'"error"' in end and end.endswith(b"data: [DONE]\n\n") for end in ends)
        assert server.process.wait(STOP_S) == 0


@pytest.mark.parametrize(
    "role",
    ["ls-worker", "ls-detokenizer", pytest.param("ls-router", marks=pytest.mark.long)],  # a fault case kills it too
)
def test_a_killed_process_is_named_and_no_client_is_left_waiting(tmp_path: Path, role: str) -> None:
    with streaming(tmp_path / "log", "--restart_worker", "off") as (server, streams):
        children = family(server)
        begin = time.monotonic()
        server.processes()[role][0].kill()

        ends = [stream.rest() for stream in streams]
        told_s = time.monotonic() - begin
        code = server.process.wait(STOP_S)

        assert all(b'"error"' in end and end.endswith(b"data: [DONE]\n\n") for end in ends)
        assert told_s < STOP_S
        assert code == 1
        wait_until(gone(children))
        assert f"{ROLES[role]} died (signal 9)" in server.log


def test_the_children_of_a_killed_launcher_exit_by_themselves(tmp_path: Path) -> None:
    with streaming(tmp_path / "log") as (server, _):
        children = family(server)

        server.process.kill()
        server.process.wait()

        wait_until(gone(children))


@pytest.mark.long  # fault cases have the parts of it
def test_the_resources_of_clients_that_disconnect_are_freed(tmp_path: Path) -> None:
    with streaming(tmp_path / "log") as (server, streams):
        wait_until(lambda: gauge(server, "num_requests_running") == 4)

        for stream in streams:
            stream.leave()

        wait_until(lambda: gauge(server, "num_requests_running") == 0)
        assert gauge(server, "kv_used_tokens") == 0
        wait_until(lambda: server.log.count("finish=abort") == 4)


def test_health_is_503_when_the_engine_hangs(tmp_path: Path) -> None:
    def status() -> int:
        place = urlsplit(server.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
        connection.request("GET", "/health")
        return connection.getresponse().status

    with running_server(tmp_path / "log", *STEP) as server:
        assert status() == 200
        router = server.processes()["ls-router"][0]
        router.suspend()
        wait_until(lambda: status() == 503)
        router.resume()
        wait_until(lambda: status() == 200)


def test_two_http_processes_share_a_port_and_the_engine(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *STEP, "--httpserver_workers", "2") as server:
        streams = [Stream(server.url, 20) for _ in range(32)]

        ends = [stream.rest() for stream in streams]

        assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)
        https = [child for name, children in server.processes().items() if "http" in name for child in children]
        assert len(https) == 2
        assert all(sum(child.cpu_times()[:2]) > 0 for child in https)


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "lightserve.server.api_server", "--null_worker", "--port", str(port)]

        run = subprocess.run(command, capture_output=True, text=True, timeout=RESPONSE_S)

    assert run.returncode == 2
    assert f"port {port}" in run.stderr
    assert str(os.getpid()) in run.stderr
    assert len(run.stderr.splitlines()) == 1
