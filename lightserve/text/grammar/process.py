"""The process that compiles the grammars of clients first: they may use up llguidance's stack, memory or time.

An HTTP process starts it as ``python -m lightserve.text.grammar.process LISTENER VOCABULARY``, two file descriptors. It
reads the vocabulary once and forks the processes that compile. If one of these dies, the next fork replaces it within
milliseconds, and only the request whose grammar it compiled has failed.

A connection is for one grammar: the client sends a GrammarSpec and shuts down its side. It gets STARTED when a process
has taken the grammar, and then a GrammarReport. If the connection ends in between, the grammar has killed the process.
These processes have less stack than the workers, so a grammar that can be compiled here can be compiled there.

All of them end with the HTTP process: the kernel kills them, or they read the end of standard input.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from lightserve.errors import InvalidRequestError
from lightserve.ipc.child_setup import end_with_parent, prepare_child
from lightserve.ipc.codec import encode, make_decode
from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar.compiler import STACK_BYTES, GrammarCompiler
from lightserve.text.grammar.vocabulary import STARTED, GrammarReport, GrammarVocabulary
from lightserve.utils.memory import allocated_bytes, resident_bytes

PROCESSES = 2  # that compile at the same time
COMPILE_LIMIT_S = 5.0  # of CPU time; most grammars take milliseconds
MAX_MEMORY_MIB = 32  # of a compiled grammar; a schema of 2,000 properties takes 8
MAX_PEAK_MIB = 256  # while it is compiled
_MIB = 2**20
_SPARE_BYTES = 2**30  # of address space beyond the peak: some is reserved and not used
_POLL_S = 0.02
_RESPAWN_S = 0.05  # at least, between two forks
_decode_spec = make_decode(GrammarSpec)


def main() -> None:
    prepare_child("grammar", 0)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(False)  # the processes compete for a connection
    compiler = _compiler(int(sys.argv[2]))
    gc.freeze()  # the collector would write to pages that the forks share
    processes = {_fork(listener, compiler) for _ in range(PROCESSES)}
    while True:
        pid, status = os.wait()
        if os.waitstatus_to_exitcode(status) == 0:
            return  # the HTTP process has ended
        processes.remove(pid)
        time.sleep(_RESPAWN_S)
        processes.add(_fork(listener, compiler))


def _compiler(vocabulary_fd: int) -> GrammarCompiler | InvalidRequestError:
    """The error, if grammars are not possible with this vocabulary, is for every request."""
    with open(vocabulary_fd, "rb") as file:
        vocabulary = make_decode(GrammarVocabulary)(file.read())
    try:
        return GrammarCompiler(vocabulary)
    except InvalidRequestError as error:
        return error


def _fork(listener: socket.socket, compiler: GrammarCompiler | InvalidRequestError) -> int:
    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        end_with_parent()
        _limit_resources()
        _serve(listener, compiler)
        exit_code = 0
    finally:
        os._exit(exit_code)


def _limit_resources() -> None:
    threading.stack_size(STACK_BYTES // 4)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what Rust prints when it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # not on a Mac
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_PEAK_MIB * _MIB + _SPARE_BYTES, hard))


def _serve(listener: socket.socket, compiler: GrammarCompiler | InvalidRequestError) -> None:
    """Compile one grammar after the other, until standard input ends."""
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        with suppress(BlockingIOError):  # another process has taken it
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):  # the client has left
                connection.setblocking(True)
                _answer(connection, compiler)


def _answer(connection: socket.socket, compiler: GrammarCompiler | InvalidRequestError) -> None:
    spec = _decode_spec(b"".join(iter(lambda: connection.recv(2**16), b"")))
    connection.sendall(STARTED)
    if isinstance(compiler, InvalidRequestError):
        connection.sendall(encode(GrammarReport(str(compiler))))
        return
    compilation = Compilation(compiler, spec)
    connection.sendall(encode(compilation.report()))
    if compilation.is_alive() or compilation.peak_mib > MAX_MEMORY_MIB:
        os._exit(1)  # it cannot be stopped, or its memory is not given back


class Compilation(threading.Thread):
    """Compiles a grammar, and computes its first mask, within limits of time and memory."""

    def __init__(self, compiler: GrammarCompiler, spec: GrammarSpec) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0
        self._compiler = compiler
        self._spec = spec
        self._report = GrammarReport("the grammar cannot be compiled")

    def run(self) -> None:
        before = allocated_bytes()
        try:
            matcher = self._compiler.build(self._spec)
        except InvalidRequestError as error:
            self._report = GrammarReport(str(error))
            return
        memory_mib = max(-(-(allocated_bytes() - before) // _MIB), 1)
        del matcher
        self._report = GrammarReport("", memory_mib)
        if memory_mib > MAX_MEMORY_MIB:
            self._report = GrammarReport(f"the grammar takes {memory_mib} MiB of memory; the limit is {MAX_MEMORY_MIB}")

    def report(self) -> GrammarReport:
        """Run, and wait for the end or for a limit."""
        begin_s, before = time.process_time(), resident_bytes()
        self.start()
        while True:
            self.join(_POLL_S)
            self.peak_mib = (resident_bytes() - before) // _MIB
            if not self.is_alive():
                return self._report
            if time.process_time() - begin_s > COMPILE_LIMIT_S:
                return GrammarReport(f"the grammar takes longer than {COMPILE_LIMIT_S:.0f} s to compile")
            if self.peak_mib > MAX_PEAK_MIB:
                return GrammarReport(f"the grammar takes more than {MAX_PEAK_MIB} MiB of memory to compile")


if __name__ == "__main__":
    main()
