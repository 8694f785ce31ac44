"""A real server in its own processes, started as its users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from test.waiting import wait_until

START_S = 240.0  # a machine that runs other things too
STOP_S = 30.0


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"ready at (http://\S+)", self.log)
        assert found, self.log
        return found[1]

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Children by the name that ps shows."""
        found: dict[str, list[psutil.Process]] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            found.setdefault(child.name(), []).append(child)
        return found

    def stop(self) -> int:
        if not self.has_ended:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextmanager
def running_server(log_path: Path, *flags: str) -> Iterator[ServerProcess]:
    """Serves the default model unless the flags say otherwise, at a free port."""
    command = [sys.executable, "-m", "lightserve.server.api_server", "--port", "0", *flags]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    server = ServerProcess(process, log_path)
    try:
        wait_until(lambda: "ready at" in server.log or server.has_ended, START_S)
        assert not server.has_ended, server.log
        yield server
    finally:
        if not server.has_ended:
            process.kill()  # its children go with it
            process.wait(STOP_S)
