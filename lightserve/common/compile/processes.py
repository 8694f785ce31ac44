"""Has kernels compiled by other processes, as many at once as there are cores.

Threads of one process gain little: half of a compilation is Python. The processes are forks of one that has imported
all kernels and knows no GPU (``common/compile/server.py``). It imports torch beside its user, and only where kernels
were never compiled: it is of no use later.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from lightserve.common.compile.cache import was_compiled

SERVER = "lightserve.common.compile.server"
A_KERNEL = "_place_tokens_kernel"  # that every step of every model launches
COMPILED = b"1"
PATIENCE_S = 120.0

_running: KernelCompiler | None = None


class KernelCompiler:
    def __init__(self, path: str) -> None:
        self._path = path
        with socket.socket(socket.AF_UNIX) as listener:  # from now on whoever asks waits until it has imported all
            listener.bind(path)
            listener.listen(socket.SOMAXCONN)
            command = [sys.executable, "-m", SERVER, str(listener.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])

    def compile(self, kernel: str, specialization: str, target: Sequence[object], launcher: str | None) -> bool:
        """Into Triton's cache, ``module:name`` for ``target``, and what launches it; False where nobody did.

        ``specialization`` is as Triton writes it.
        """
        job = {"kernel": kernel, "specialization": specialization, "target": list(target), "launcher": launcher}
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE_S)
            line.connect(self._path)
            line.sendall(json.dumps(job).encode())
            line.shutdown(socket.SHUT_WR)
            return line.recv(1) == COMPILED
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


@contextlib.contextmanager
def kernel_compiler(path: str) -> Iterator[None]:
    """Within it ``running_compiler`` is one that listens at ``path``, unless kernels were compiled before."""
    global _running
    if was_compiled(A_KERNEL):
        yield
        return
    _running = KernelCompiler(path)
    try:
        yield
    finally:
        _running.close()
        _running = None


def running_compiler() -> KernelCompiler | None:
    return _running
