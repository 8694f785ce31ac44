"""The process that compiles kernels for others: it imports all of them once and forks for each that is asked for.

python -m lightserve.common.compile.server FD, by common/compile/processes.py; it ends when its input does.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from importlib import import_module
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import lightserve.common.triton_kernel  # noqa: F401  which takes seconds
from lightserve.common.compile.processes import COMPILED


class AbsentGpu:
    """What the compiler asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
    with selectors.DefaultSelector() as events:
        events.register(sys.stdin, selectors.EVENT_READ)
        events.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    return
                line, _ = listener.accept()
                with line:
                    if os.fork() == 0:
                        listener.close()
                        _answer(line)


def _answer(line: socket.socket) -> None:
    """In a process of its own; whatever goes wrong, who asked compiles the kernel itself and tells."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the compiler waits for its assembler
        _compile(**json.loads(b"".join(iter(lambda: line.recv(1 << 16), b""))))
        line.sendall(COMPILED)
    finally:
        os._exit(0)


def _compile(kernel: str, specialization: str, target: list[Any], launcher: str | None) -> None:
    driver.set_active(AbsentGpu(GPUTarget(*target)))
    compiled = _named(kernel).preload(specialization)
    if launcher is not None:
        _named(launcher)(compiled.src, compiled.metadata)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


if __name__ == "__main__":
    main()
