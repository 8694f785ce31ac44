"""The client of the compile server, and its start.

Threads of one process gain little, because half of a compilation is Python. So other processes compile, as many at once
as kernels are asked for. The server (``server.py``) imports torch while the worker does, and is started only if kernels
were never compiled before.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from lightserve.common.compile.cache import was_compiled
from lightserve.utils.drivers import may_have_gpu

SERVER_MODULE = "lightserve.common.compile.server"
EVERY_STEP_KERNEL = "_place_tokens_kernel"  # every step of every model launches it
COMPILED = b"1"
TIMEOUT_S = 120.0

_running: CompileServer | None = None


class CompileServer:
    """A process that compiles kernels. It listens on a Unix socket and ends with the process that started it."""

    def __init__(self, path: str) -> None:
        self._path = path
        with socket.socket(socket.AF_UNIX) as listener:  # a client that connects early waits until all is imported
            listener.bind(path)
            listener.listen(socket.SOMAXCONN)
            command = [sys.executable, "-m", SERVER_MODULE, str(listener.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])

    def compile(self, kernel: str, specialization: str, target: Sequence[object], launcher: str | None) -> bool:
        """Compile ``module:name`` for ``target``, and its launcher, into Triton's cache; False if that failed.

        ``specialization`` is the JSON that Triton writes.
        """
        job = {"kernel": kernel, "specialization": specialization, "target": list(target), "launcher": launcher}
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(self._path)
            connection.sendall(json.dumps(job).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == COMPILED
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


@contextlib.contextmanager
def compile_server(path: str) -> Iterator[None]:
    """Within it a compile server listens at ``path``, unless kernels were compiled before."""
    global _running
    if was_compiled(EVERY_STEP_KERNEL):
        yield
        return
    _running = CompileServer(path)
    try:
        yield
    finally:
        _running.close()
        _running = None


def compilers_for(device: str | None, path: str) -> contextlib.AbstractContextManager[None]:
    """``compile_server``, if there are kernels to compile for ``--device``."""
    has_kernels = may_have_gpu(device) and find_spec("triton") is not None
    return compile_server(path) if has_kernels else contextlib.nullcontext()


def running_server() -> CompileServer | None:
    """The server of the surrounding ``compile_server``, if there is one."""
    return _running
