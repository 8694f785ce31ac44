"""The compile server: it imports all kernels once and forks a process for each kernel that it is asked for.

``client.py`` starts it as ``python -m lightserve.common.compile.server FD``, where FD is a listening socket. It ends
when its standard input is closed.
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
from lightserve.common.compile.client import COMPILED


class AbsentGpu:
    """A stand-in for Triton's driver: it knows the GPU to compile for, which need not be there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    with selectors.DefaultSelector() as events:
        events.register(sys.stdin, selectors.EVENT_READ)
        events.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    return
                connection, _ = listener.accept()
                with connection:
                    if os.fork() == 0:
                        listener.close()
                        _serve(connection)


def _serve(connection: socket.socket) -> None:
    """Compile one kernel, in a process of its own. If that fails, the client compiles it and reports the error."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the compiler waits for its assembler
        _compile(**json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b""))))
        connection.sendall(COMPILED)
    finally:
        os._exit(0)


def _compile(kernel: str, specialization: str, target: list[Any], launcher: str | None) -> None:
    driver.set_active(AbsentGpu(GPUTarget(*target)))
    compiled = _load(kernel).preload(specialization)
    if launcher is not None:
        _load(launcher)(compiled.src, compiled.metadata)


def _load(name: str) -> Any:
    """The object ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


if __name__ == "__main__":
    main()
