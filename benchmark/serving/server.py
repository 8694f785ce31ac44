"""A server that a benchmark starts, watches and stops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
START_S = 60.0


class Server:
    """A real server in its own processes. Its log goes to a temporary file."""

    def __init__(
        self,
        flags: list[str],
        has_http: bool = True,
        module: str = "lightserve.server.api_server",
        tree: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """``tree``: the folder to start it in, whose ``lightserve`` then runs; None: that of this process."""
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115  closed in stop
        command = [sys.executable, "-m", module, *flags]
        if has_http:  # an engine of a cluster has none
            command += ["--port", "0", "--disable_log_requests"]
        self._process = subprocess.Popen(command, stderr=self._log, cwd=tree, env=environment)

    def wait_until_ready(self, timeout_s: float = START_S) -> str:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._process.poll() is None:
            found = re.search(r"ready at (\S+)", self.log())
            if found:
                return found[1]
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self.log()}")

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def processes(self) -> Iterator[tuple[int, str]]:
        """The pid and the name of each child process."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            except OSError:  # it has just exited
                continue
            if (name.startswith("ls-") or name == "haproxy") and int(rest.split()[1]) == self._process.pid:
                yield int(path.parent.name), name

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds used so far, by the name of the process."""
        used: dict[str, float] = {}
        for pid, name in self.processes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[name] = used.get(name, 0.0) + (int(fields[11]) + int(fields[12])) * TICK_S
        return used

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()
