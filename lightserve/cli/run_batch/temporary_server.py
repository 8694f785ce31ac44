"""A server that lives as long as a run of ``lightserve run-batch``."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightserve.errors import LightserveError
from lightserve.ipc.child_setup import end_with_parent

READY = re.compile(r"ready at (https?://\S+)")
FLAGS = ("--port", "0", "--disable_log_requests", "--log_format", "text")
STOP_S = 60.0


@contextmanager
def temporary_server(flags: Sequence[str]) -> Iterator[str]:
    """The address of a server with these flags."""
    command = [sys.executable, "-m", "lightserve.server.api_server", *flags, *FLAGS]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends the run, which ends the server
        preexec_fn=end_with_parent,
    )
    try:
        yield _wait_ready(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(process: subprocess.Popen[str]) -> str:
    """The progress of the start is shown, and what the server logs later."""
    assert process.stderr is not None
    for line in process.stderr:
        if match := READY.search(line):
            threading.Thread(target=_copy, args=(process,), daemon=True).start()
            return match[1]
        sys.stderr.write(line)
    raise LightserveError(f"the server did not start (exit code {process.wait()}); its last lines say why")


def _copy(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if not line.startswith("  "):  # the rest of the banner
            sys.stderr.write(line)
