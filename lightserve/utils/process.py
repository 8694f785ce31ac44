"""A process of the server as it sees itself: how it begins, how it talks to the launcher, and how it ends.

The launcher gives every child one end of a socket pair, its number as the only argument. Lines of JSON cross it: first
a Boot, then ToChild one way and FromChild the other. The line going dead means that the launcher is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import msgspec

from lightserve.config import ServerConfig
from lightserve.errors import LightserveError
from lightserve.io_struct import Failed, FromChild, Ping, Pong, ToChild

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the launcher decides what they mean
EXIT_CRASH = 1
EXIT_MISTAKE = 2  # the operator can mend it: a flag, a file, a port

_MESSAGE_LEN = 1000  # characters of a last word: one line, and far below what the launcher reads at once
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_NAME_LEN = 15  # the kernel keeps no more


class Boot(msgspec.Struct, frozen=True):
    """What a child is told first."""

    config: ServerConfig
    run_dir: str  # for sockets; only this user can open it, and it goes when the server goes
    index: int = 0  # among the children of its role; a worker's rank
    listen_fd: int | None = None  # of an HTTP process
    generation: int = 0  # of a worker: how often others were replaced before

    def path(self, name: str) -> str:
        return f"{self.run_dir}/{name}"

    def worker_path(self, rank: int, generation: int) -> str:
        """Where a worker listens. Each generation has its own: who comes late for one does not meet the next."""
        return self.path(f"worker-{rank}-{generation}")

    def address(self, name: str) -> str:
        """Of a ZMQ socket."""
        return f"ipc://{self.path(name)}"


class Parent:
    """The launcher as its child sees it. The child ends, whatever it is doing, when the launcher does."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._inbox: asyncio.Queue[ToChild] = asyncio.Queue()

    def send(self, message: FromChild) -> None:
        """From any thread; a launcher that is gone does not mind."""
        with self._sending, contextlib.suppress(OSError):
            self._line.sendall(msgspec.json.encode(message) + b"\n")

    async def recv(self) -> ToChild:
        return await self._inbox.get()

    def watch(self, lines: Iterator[bytes], loop: asyncio.AbstractEventLoop | None) -> None:
        """Hand what comes to the loop, in a thread of its own: it must see the end also while the loop is busy."""
        threading.Thread(target=self._watch, args=(lines, loop), name="launcher", daemon=True).start()

    def _watch(self, lines: Iterator[bytes], loop: asyncio.AbstractEventLoop | None) -> None:
        decode = msgspec.json.Decoder(ToChild).decode
        for line in lines:
            message = decode(line)
            if loop is None:
                if isinstance(message, Ping):
                    self.send(Pong())
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._take, message)
        _exit(EXIT_CRASH)  # nobody is left who could tell anyone

    def _take(self, message: ToChild) -> None:
        """In the loop, so that only a loop that runs answers a Ping."""
        if isinstance(message, Ping):
            self.send(Pong())
        else:
            self._inbox.put_nowait(message)


Main = Callable[[Boot, Parent], Coroutine[Any, Any, None] | None]


def run_child(role: str, main: Main) -> NoReturn:
    """Be a child of the launcher: run ``main``, async (under uvloop) or plain, and end the process.

    An exception becomes Failed, the last word: with code 2 and no traceback for a LightserveError, else code 1 and one.
    A plain function can send but not receive.
    """
    line = _line_to_launcher(sys.argv)
    lines = _lines(line)
    parent = Parent(line)
    first = next(lines, None)
    if first is None:  # the launcher went while this process was importing
        _exit(EXIT_CRASH)
    try:
        boot = msgspec.json.decode(first, type=Boot)
        _prepare(role, boot.index)
        _run(main, boot, parent, lines)
    except BaseException as error:
        _exit(_report(error, parent))
    _exit(0)


def _line_to_launcher(argv: list[str]) -> socket.socket:
    if len(argv) != 2 or not argv[1].isdecimal():
        sys.exit("this is a part of the server; start the whole: python -m lightserve.server.api_server")
    os.set_inheritable(int(argv[1]), False)  # a compiler that we start must not keep the line open
    return socket.socket(fileno=int(argv[1]))


def _lines(line: socket.socket) -> Iterator[bytes]:
    buffer = b""
    with contextlib.suppress(OSError):
        while chunk := line.recv(_READ_BYTES):
            *whole, buffer = (buffer + chunk).split(b"\n")
            yield from whole


def _prepare(role: str, index: int) -> None:
    """The launcher held back the signals until now: a child that is still importing must not die of them."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends us even where no Python runs any more
        libc.prctl(_PR_SET_NAME, process_name(role, index).encode())


def process_name(role: str, index: int) -> str:
    """What ps shows: ls-router, ls-worker, ls-worker-1."""
    suffix = f"-{index}" if index else ""
    return f"ls-{role.split()[-1]}"[: _NAME_LEN - len(suffix)] + suffix


def _run(main: Main, boot: Boot, parent: Parent, lines: Iterator[bytes]) -> None:
    if not inspect.iscoroutinefunction(main):
        parent.watch(lines, loop=None)
        main(boot, parent)
        return
    import uvloop  # workers, which are in a hurry, do without

    async def under_watch() -> None:
        parent.watch(lines, asyncio.get_running_loop())
        work = main(boot, parent)
        if work is not None:
            await work

    uvloop.run(under_watch())


def _report(error: BaseException, parent: Parent) -> int:
    """Tell the launcher in a line and the log in full; the exit code."""
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    message = one_line(cause)
    if isinstance(cause, LightserveError):
        parent.send(Failed(message))
        return EXIT_MISTAKE
    traceback.print_exception(error)
    parent.send(Failed(f"{type(cause).__name__}: {message}"))
    return EXIT_CRASH


def one_line(error: BaseException) -> str:
    """What it says, fit for a terminal: it may quote a damaged file."""
    printable = "".join(char if char.isprintable() else " " for char in str(error))
    return " ".join(printable.split())[:_MESSAGE_LEN]


def _exit(code: int) -> NoReturn:
    """At once: no thread, no socket with unsent messages can keep the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
