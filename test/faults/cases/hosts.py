"""Hosts without some resource or with leftovers, and signals during the start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request

import psutil

from lightserve.model_files import resolve
from test.api.server import RESPONSE_S, STOP_S, ServerProcess
from test.faults.resource_snapshot import processes_of, run_directories
from test.faults.start_case import Start, StartCase
from test.ports import free_port
from test.waiting import wait_until

SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh")


def can_unshare() -> bool:
    return subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode == 0


def port_in_use(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start.launch("--port", port)
        assert server.process.wait(STOP_S) == 2
    assert server.log.count("\n") == 1
    assert f"port {port} is in use by process {os.getpid()}" in server.log


def two_servers(start: Start) -> None:
    """The death of one server does not affect the other."""
    first, second = start.launch(), start.launch()
    start.check_serves(first)
    start.check_serves(second)
    kill_and_wait(second)
    start.check_serves(first)
    assert first.stop() == 0
    assert clean_next_start(start)


def leftovers_of_a_crash(start: Start) -> None:
    """The next server removes them, but nothing of a running server."""
    living, dead = start.launch(), start.launch()
    start.wait_ready(living)
    start.wait_ready(dead)
    kill_and_wait(dead)
    assert len(run_directories(start.base)) == 2
    assert clean_next_start(start, left=1)
    start.check_serves(living)
    assert living.stop() == 0


def kill_and_wait(server: ServerProcess) -> None:
    children = [child for group in server.processes().values() for child in group]
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(child.is_running() for child in children))


def clean_next_start(start: Start, left: int = 0) -> bool:
    server = start.launch()
    start.check_serves(server)
    assert server.stop() == 0
    return len(run_directories(start.base)) == left


def no_home_and_no_tmp(start: Start) -> None:
    """If HOME and TMPDIR are not writable, the server finds a directory that is."""
    model_dir = str(resolve(None, needs_weights=False).path)
    env = {"HOME": "/proc", "TMPDIR": f"{start.base}/missing", "XDG_CACHE_HOME": "/proc"}
    server = start.launch("--model_dir", model_dir, env=env)
    start.check_serves(server)
    assert server.stop() == 0


def small_shared_memory(start: Start) -> None:
    server = start.launch(under=SMALL_SHM)
    start.check_serves(server)
    assert server.stop() == 0


def full_disk(start: Start) -> None:
    """No log line can be written."""
    served_without_log(start, "exec 2>/dev/full >/dev/full")


def log_that_nobody_reads(start: Start) -> None:
    served_without_log(start, "exec 2> >(exit) >&2")


def served_without_log(start: Start, redirect: str) -> None:
    port = free_port()
    server = start.launch("--port", str(port), under=("bash", "-c", f'{redirect}; exec "$@"', "bash"))
    wait_until(lambda: status(port, "/health") == 200 or server.has_ended)
    assert status(port, "/version") == 200
    assert server.stop() == 0


def interrupted_start(start: Start) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        server = start.launch()
        wait_until(lambda server=server: bool(server.processes()))  # type: ignore[misc]
        server.process.send_signal(signum)
        assert server.process.wait(STOP_S) == 128 + signum
        assert not processes_of(start.base)


def worker_killed_at_the_start(start: Start) -> None:
    server = start.launch()
    worker = first_child(server)
    worker.kill()
    assert server.process.wait(STOP_S) == 1
    assert "model worker 0 died (signal 9)" in server.log


def asked_while_loading(start: Start) -> None:
    """Health and metrics respond at once, with the right status."""
    port = free_port()
    server = start.launch("--port", str(port))
    worker = first_child(server)
    worker.suspend()
    wait_until(lambda: status(port, "/liveness") == 200)
    assert status(port, "/health") == status(port, "/v1/models") == 503
    assert status(port, "/metrics") == 200
    worker.resume()
    start.check_serves(server)
    assert server.stop() == 0


def first_child(server: ServerProcess) -> psutil.Process:
    """The model worker. Until its module runs, it shows the command line of the launcher."""

    def own() -> list[psutil.Process]:
        children = [child for group in server.processes().values() for child in group]
        return [child for child in children if any("lightserve.worker" in word for word in child.cmdline())]

    wait_until(lambda: bool(own()))
    return own()[0]


def status(port: int, path: str) -> int:
    """The HTTP status; 0 while no process listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=RESPONSE_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


CASES = [
    StartCase("the port is in use", port_in_use, "one line with port and process, exit code 2"),
    StartCase("two servers on one host, one is killed", two_servers, "the other serves on", within_s=60.0),
    StartCase("leftovers of a crash", leftovers_of_a_crash, "the next start removes them", within_s=60.0),
    StartCase("HOME and TMPDIR cannot be written", no_home_and_no_tmp, "serves"),
    StartCase("the log's disk is full", full_disk, "serves"),
    StartCase("nobody reads the log", log_that_nobody_reads, "serves"),
    StartCase("a signal during the start", interrupted_start, "exit code 128 + n"),
    StartCase("the worker is killed during the start", worker_killed_at_the_start, "all ends, exit code 1"),
    StartCase("asked while the model loads", asked_while_loading, "/health 503, /metrics 200"),
]
if can_unshare():
    CASES.append(StartCase("/dev/shm of 64 kB", small_shared_memory, "serves"))
