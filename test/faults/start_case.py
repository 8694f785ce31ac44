"""Cases about the start of the server and its environment."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from test.api.server import MODULE, START_S, ServerProcess, start_server
from test.api.test_faults import Client
from test.faults.resource_snapshot import GPU_SLACK_MIB, gpu_mib, processes_of, run_directories
from test.faults.server_pool import NULL_WORKER, SETTLE_S
from test.waiting import wait_until


@dataclass
class Start:
    """A TMPDIR that identifies the processes and files of the servers started in it."""

    base: Path
    worker: Sequence[str] = NULL_WORKER
    exits: ExitStack = field(default_factory=ExitStack)

    def launch(self, *flags: str, env: Mapping[str, str] | None = None, under: Sequence[str] = ()) -> ServerProcess:
        """Start a server, optionally ``under`` another command."""
        log = self.base / f"log-{time.monotonic_ns()}"
        command = [*under, sys.executable, *MODULE, *self.worker, "--port", "0", *flags]
        server = start_server(log, command, {"TMPDIR": str(self.base), **(env or {})})
        self.exits.callback(self._end, server)
        return server

    def wait_ready(self, server: ServerProcess) -> None:
        wait_until(lambda: "ready at" in server.log or server.has_ended, START_S)
        assert not server.has_ended, server.log

    def check_serves(self, server: ServerProcess) -> None:
        self.wait_ready(server)
        client = Client(server)
        wait_until(lambda: client.send("GET", "/health")[0] == 200)  # maybe a little later than the log says
        assert client.golden()
        client.close()

    def _end(self, server: ServerProcess) -> None:
        if not server.has_ended:
            server.process.kill()
        server.process.wait()


@dataclass(frozen=True, slots=True)
class StartCase:
    name: str
    check: Callable[[Start], None]
    reaction: str
    within_s: float = 20.0
    is_long: bool = True

    def run(self, slack: float = 1.0, worker: Sequence[str] = NULL_WORKER) -> float:
        """Return the seconds it took. Raise an exception after any other reaction or if anything is left behind."""
        within_s = self.within_s * slack if worker == NULL_WORKER else START_S
        gpu_mib_before = gpu_mib()
        with tempfile.TemporaryDirectory(prefix="ls-faults-", dir="/tmp") as base:
            start = Start(Path(base), worker)
            with start.exits:
                begin_s = time.monotonic()
                self.check(start)
                seconds = time.monotonic() - begin_s
            wait_until(lambda: not processes_of(start.base), SETTLE_S)
            assert not run_directories(start.base)
        wait_until(lambda: gpu_mib() <= gpu_mib_before + GPU_SLACK_MIB, SETTLE_S)
        assert seconds < within_s, f"it took {seconds:.1f} s"
        return seconds
