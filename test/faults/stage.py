"""The server that cases break, one at a time: it stays while it lives and the next case wants the same flags."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from test.api.server import SAMPLED_S, ServerProcess, running_server
from test.api.test_faults import ABORT, Client
from test.faults.census import (
    GPU_SLACK_MIB,
    Census,
    gpu_mib,
    grown,
    processes_of,
    run_directories,
    shared_memory_of,
    take_census,
)
from test.faults.engine import measured_engine, null_engine
from test.waiting import wait_until

NULL_WORKER = ("--null_worker",)
ONE_HTTP_PROCESS = ("--httpserver_workers", "1")  # that cases can stop, and ask for its load
SETTLE_S = 10.0  # after which what is still there was left behind
THREAD_POOL = 8  # more than an HTTP process starts for bodies that take long to parse
MAX_RESTARTS = 3  # in a row; at the next death of a worker the server gives up


class Running:
    """A server in a TMPDIR of its own, by which its processes and files are known."""

    def __init__(self, program: str, flags: Sequence[str]) -> None:
        self.gpu_mib_before = gpu_mib()
        self.restarts = 0  # of its worker, by cases
        self._exits = ExitStack()
        self.base = Path(tempfile.mkdtemp(prefix="ls-faults-", dir="/tmp"))  # short: a socket's path has a limit
        self._exits.callback(shutil.rmtree, self.base, ignore_errors=True)
        self._exits.callback(self._await_end)
        begin_s = time.monotonic()
        env = {"TMPDIR": str(self.base)}
        started = running_server(self.base / "log", *ONE_HTTP_PROCESS, *flags, program=("-m", program), env=env)
        self.server: ServerProcess = self._exits.enter_context(started)
        self.start_s = time.monotonic() - begin_s  # what another worker takes at most
        self.client = Client(self.server)
        self._fill_thread_pools()
        self.engine = (null_engine if NULL_WORKER[0] in flags else measured_engine)(self.client)
        self.golden = self.client.golden()
        self.shared_memory = shared_memory_of(self.base)

    @property
    def run_directory(self) -> Path:
        (directory,) = run_directories(self.base)
        return directory

    def is_idle(self) -> bool:
        """Up to a second ago."""
        names = ("kv_used_tokens", "num_requests_running", "num_requests_waiting")
        seen = self.server.metrics()
        return all(seen[name] == 0 for name in names)

    def census(self) -> Census:
        return take_census(self.base)

    def check_unharmed(self) -> None:
        """Healthy, the same tokens for the same request, and no memory held."""
        self.client.close()  # the server may have, where the case took long
        wait_until(lambda: self.client.send("GET", "/health")[0] == 200)
        assert self.client.golden() == self.golden
        asked_s = time.monotonic()  # what the metrics tell must be of later than this
        wait_until(lambda: time.monotonic() - asked_s > SAMPLED_S and self.is_idle())

    def leftovers(self, before: Census) -> str:
        """What is there that was not before, when it has had time to go; empty if nothing."""
        try:
            wait_until(lambda: not grown(before, self.census()), SETTLE_S)
        except TimeoutError:
            return grown(before, self.census())
        return ""

    def check_gone(self, leaves_directory: bool) -> None:
        """Nothing is left of a server that has ended."""
        assert not processes_of(self.base)
        assert leaves_directory or not run_directories(self.base)
        assert not [path for path in self.shared_memory if Path(path).exists()]
        self._await_end()

    def close(self) -> None:
        self._exits.close()

    def _await_end(self) -> None:
        """Until its processes are gone and the GPU's memory is free: the next server is to find it so."""
        wait_until(lambda: not processes_of(self.base), SETTLE_S)
        wait_until(lambda: gpu_mib() <= self.gpu_mib_before + GPU_SLACK_MIB, SETTLE_S)

    def _fill_thread_pools(self) -> None:
        """Threads that the first large bodies start stay: they are no leak."""
        large = {"request_id": "x" * 2**20}
        clients = [Client(self.server) for _ in range(THREAD_POOL)]
        with ThreadPoolExecutor(THREAD_POOL) as pool:
            for asked in [pool.submit(client.post, ABORT, large) for client in clients]:
                asked.result()
        for client in clients:
            client.close()


class Stage:
    def __init__(self, worker: Sequence[str] = NULL_WORKER) -> None:
        self._worker = worker
        self._running: Running | None = None
        self._wanted: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.clear()

    def running(self, program: str, flags: Sequence[str], restarts: int = 0) -> Running:
        """One that survives as many restarts of its worker, even if the case is tried twice."""
        wanted = (program, *self._worker, *flags)
        worn = self._running.restarts if self._running is not None else 0
        is_worn_out = bool(worn and restarts) and worn + 2 * restarts > MAX_RESTARTS
        if self._running is None or self._wanted != wanted or is_worn_out:
            self.clear()
            self._running, self._wanted = Running(program, wanted[1:]), wanted
        return self._running

    def clear(self) -> None:
        """The next case gets a new server."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
