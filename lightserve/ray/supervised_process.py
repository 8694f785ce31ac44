"""A process that an actor starts, watches and starts again when it dies. Knows nothing of Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

from lightserve.ipc.process import EXIT_CRASH
from lightserve.ray.messages import ProcessStatus, State

READY = re.compile(r'ready at ([^\s"]+)')
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0  # the time between two starts doubles
KEPT_LINES = 20


def lightserve_command(*args: str) -> list[str]:
    """The lightserve command, as a process that ends with this one."""
    return [sys.executable, "-m", "lightserve.cli.child", str(os.getpid()), *args]


class SupervisedProcess:
    """``command`` makes the command of each start: a new port for each."""

    def __init__(self, command: Callable[[], list[str]]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._state: State = "starting"
        self._address = ""
        self._reason = ""
        self._starts = 0
        self._failures = 0  # since it last served
        self._exit_code: int | None = None
        self._stop_requested = threading.Event()
        # The thread that starts a process must live as long as it: the kernel ends the process with this thread.
        self._thread = threading.Thread(target=self._keep, name="kept process", daemon=True)
        self._thread.start()

    def status(self) -> ProcessStatus:
        with self._lock:
            restarts = max(self._starts - 1, 0)
            return ProcessStatus(self._state, self._address, self._reason, restarts, self._exit_code)

    def drain(self) -> None:
        """Let it finish its requests and end. It is not started again."""
        with self._lock:
            if self._stop_requested.is_set():
                return
            self._stop_requested.set()
            running = self._process
            if self._state != "failed":
                self._state = "draining"
        if running is not None and running.poll() is None:
            running.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended after ``drain``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _keep(self) -> None:
        while not self._stop_requested.is_set():
            code, last_line = self._run()
            with self._lock:
                self._process, self._exit_code = None, code
                if self._stop_requested.is_set():
                    break
                self._failures += 1
                self._state, self._reason = (
                    "failed",
                    f"exit code {code}: {last_line}" if last_line else f"exit code {code}",
                )
            self._stop_requested.wait(min(FIRST_RETRY_S * 2 ** (self._failures - 1), LAST_RETRY_S))
        with self._lock:
            self._state = "stopped"

    def _run(self) -> tuple[int, str]:
        """One life of the process. Returns its exit code and its last line."""
        with self._lock:
            if self._stop_requested.is_set():
                return 0, ""
            self._starts += 1
            try:
                process = self._process = self._start()
            except OSError as error:  # no memory, no port
                return EXIT_CRASH, str(error)
        lines: deque[str] = deque(maxlen=KEPT_LINES)
        reader = threading.Thread(target=self._read, args=(process, lines), name="its log", daemon=True)
        reader.start()
        code = process.wait()
        reader.join(timeout=1.0)  # a child of it may keep the pipe open
        return code, next((line for line in reversed(lines) if line.strip()), "")

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _read(self, process: subprocess.Popen[str], lines: deque[str]) -> None:
        """Its log becomes a part of this process's log, which Ray collects."""
        for line in process.stderr or ():
            lines.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)
            if match := READY.search(line):
                with self._lock:
                    self._address, self._reason, self._failures = match[1], "", 0
                    if not self._stop_requested.is_set():
                        self._state = "serving"
