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
from test.faults.census import Census, gpu_mib, grown, processes_of, run_directories, shared_memory_of, take_census
from test.waiting import wait_until

NULL_WORKER = ("--null_worker",)
SETTLE_S = 10.0  # after which what is still there was left behind
GPU_SLACK_MIB = 64  # others use the card too
THREAD_POOL = 8  # more than an HTTP process starts for bodies that take long to parse


class Running:
    """A server in a TMPDIR of its own, by which its processes and files are known."""

    def __init__(self, program: str, flags: Sequence[str]) -> None:
        self.gpu_mib_before = gpu_mib()
        self._exits = ExitStack()
        self.base = Path(tempfile.mkdtemp(prefix="ls-faults-", dir="/tmp"))  # short: a socket's path has a limit
        self._exits.callback(shutil.rmtree, self.base, ignore_errors=True)
        env = {"TMPDIR": str(self.base)}
        started = running_server(self.base / "log", *flags, program=("-m", program), env=env)
        self.server: ServerProcess = self._exits.enter_context(started)
        self.client = Client(self.server)
        self._fill_thread_pools()
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
        wait_until(lambda: gpu_mib() <= self.gpu_mib_before + GPU_SLACK_MIB, SETTLE_S)

    def close(self) -> None:
        self._exits.close()

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

    def running(self, program: str, flags: Sequence[str]) -> Running:
        wanted = (program, *self._worker, *flags)
        if self._running is None or self._wanted != wanted:
            self.clear()
            self._running, self._wanted = Running(program, wanted[1:]), wanted
        return self._running

    def clear(self) -> None:
        """The next case gets a new server."""
        if self._running is not None:
            self._running.close()
        self._running = None
