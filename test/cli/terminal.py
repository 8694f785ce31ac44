"""A program in a pseudo-terminal of its own, as a person sits in front of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120.0  # far longer than any test needs, even on a loaded machine
CTRL_C, CTRL_D = "\x03", "\x04"
# makes the terminal the controlling one, so that Ctrl-C sends a signal, and becomes the program
BECOME = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self.raw = ""  # everything that was written so far
        self._seen = 0  # characters that an earlier wait_for has passed

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until ``text`` is there. Return what came before it since the last call, without escapes."""
        end = time.monotonic() + DEADLINE_S
        while (found := self.raw.find(text, self._seen)) < 0:
            is_open = time.monotonic() < end and self._read()
            assert is_open, f"no {text!r} in {self.raw[self._seen :]!r}"
        before, self._seen = self.raw[self._seen : found], found + len(text)
        return ESCAPES.sub("", before)

    def wait_end(self) -> int:
        while self._read():
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        """False at the end of the program, whose terminal is then closed."""
        if not select.select([self._master], [], [], DEADLINE_S)[0]:
            return False
        with contextlib.suppress(OSError):
            piece = os.read(self._master, 65536).decode(errors="replace")
            self.raw += piece
            return bool(piece)
        return False


@contextlib.contextmanager
def in_terminal(
    *argv: str, env: Mapping[str, str] | None = None, program: tuple[str, ...] = ("-m", "lightserve.cli.main")
) -> Iterator[Terminal]:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-c", BECOME, sys.executable, *program, *argv]
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LIGHTSERVE_API_KEY")}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env=inherited | {"TERM": "xterm-256color"} | dict(env or {}),
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        os.close(master)
