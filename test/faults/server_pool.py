"""The server that cases break. It is reused as long as it runs and the next case needs the same flags."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from lightserve.text.grammar.process import PROCESSES
from test.api.server import SAMPLED_S, ServerProcess, running_server
from test.api.test_faults import Client
from test.faults.model_limits import measured_limits, null_worker_limits
from test.faults.resource_snapshot import (
    GPU_SLACK_MIB,
    ResourceSnapshot,
    describe_growth,
    gpu_mib,
    processes_of,
    run_directories,
    shared_memory_of,
    take_snapshot,
)
from test.waiting import wait_until

NULL_WORKER = ("--null_worker",)
ONE_HTTP_PROCESS = ("--httpserver_workers", "1")  # cases stop it and query its load
SETTLE_S = 60.0  # resources that remain longer count as leaked
FIRST_SETTLE_S = 5.0  # before a case runs again: what is left then is mostly a cache, and stays
GRAMMAR_PROCESSES = 1 + PROCESSES  # they start beside the server; it is healthy before
MAX_RESTARTS = 3  # in a row; the server ends at the next death of a worker


class ServerUnderTest:
    """A server with its own TMPDIR, which identifies its processes and files."""

    def __init__(self, program: str, flags: Sequence[str]) -> None:
        self.flags = tuple(flags)
        self.gpu_mib_before = gpu_mib()
        self.restarts = 0  # of its worker, caused by cases
        self._exits = ExitStack()
        self.base = Path(tempfile.mkdtemp(prefix="ls-faults-", dir="/tmp"))  # short: the path of a socket is limited
        self._exits.callback(shutil.rmtree, self.base, ignore_errors=True)
        self._exits.callback(self._wait_exited)
        begin_s = time.monotonic()
        env = {"TMPDIR": str(self.base)}
        started = running_server(self.base / "log", *ONE_HTTP_PROCESS, *flags, program=("-m", program), env=env)
        self.server: ServerProcess = self._exits.enter_context(started)
        self.start_s = time.monotonic() - begin_s  # an upper bound for the restart of a worker
        self.client = Client(self.server)
        if "--task" not in flags:  # it generates text
            wait_until(lambda: len(self.server.processes().get("ls-grammar", ())) == GRAMMAR_PROCESSES)
        self.engine = (null_worker_limits if NULL_WORKER[0] in flags else measured_limits)(self.client)
        self.expected_tokens = self.client.golden()
        self.shared_memory = shared_memory_of(self.base)

    @property
    def run_directory(self) -> Path:
        (directory,) = run_directories(self.base)
        return directory

    def is_idle(self) -> bool:
        """Whether it was idle at most a second ago."""
        seen = self.server.metrics()
        has_requests = seen["num_requests_running"] or seen["num_requests_waiting"]
        return not has_requests and seen["kv_used_tokens"] == seen["kv_pinned_tokens"]

    def resource_snapshot(self) -> ResourceSnapshot:
        return take_snapshot(self.base)

    def check_recovered(self) -> None:
        """Check that the server is healthy, returns the same tokens for the same request, and holds no KV of one."""
        self.client.close()  # the server may have closed it during a long case
        wait_until(lambda: self.client.send("GET", "/health")[0] == 200)
        assert self.client.golden() == self.expected_tokens
        asked_s = time.monotonic()  # the metrics must be newer than this
        wait_until(lambda: time.monotonic() - asked_s > SAMPLED_S and self.is_idle())

    def leftovers(self, before: ResourceSnapshot, is_last: bool) -> str:
        """Describe resources that were not there before and do not disappear; empty if there are none."""
        limit_s = SETTLE_S if is_last else FIRST_SETTLE_S
        try:
            wait_until(lambda: not describe_growth(before, self.resource_snapshot()), limit_s)
        except TimeoutError:
            return describe_growth(before, self.resource_snapshot())
        return ""

    def check_no_leftovers(self, keeps_directory: bool) -> None:
        """Check that nothing is left of a server that has ended."""
        assert not processes_of(self.base)
        assert keeps_directory or not run_directories(self.base)
        assert not [path for path in self.shared_memory if Path(path).exists()]
        self._wait_exited()

    def close(self) -> None:
        self._exits.close()

    def _wait_exited(self) -> None:
        """Wait until its processes have exited and the GPU's memory is free for the next server."""
        wait_until(lambda: not processes_of(self.base), SETTLE_S)
        wait_until(lambda: gpu_mib() <= self.gpu_mib_before + GPU_SLACK_MIB, SETTLE_S)


class ServerPool:
    def __init__(self, worker: Sequence[str] = NULL_WORKER) -> None:
        self._worker = worker
        self._running: ServerUnderTest | None = None
        self._wanted: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.clear()

    def running(self, program: str, flags: Sequence[str], restarts: int = 0) -> ServerUnderTest:
        """A server that survives ``restarts`` restarts of its worker, even if the case runs twice."""
        wanted = (program, *self._worker, *flags)
        restarts_so_far = self._running.restarts if self._running is not None else 0
        is_exhausted = bool(restarts_so_far and restarts) and restarts_so_far + 2 * restarts > MAX_RESTARTS
        if self._running is None or self._wanted != wanted or is_exhausted:
            self.clear()
            self._running, self._wanted = ServerUnderTest(program, wanted[1:]), wanted
        return self._running

    def clear(self) -> None:
        """Stop the server: the next case gets a new one."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
