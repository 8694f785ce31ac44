"""A process of the server as the launcher sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping

import msgspec

from lightserve.errors import ServerError
from lightserve.io_struct import (
    Drained,
    EngineReady,
    Failed,
    FromChild,
    Phase,
    Ping,
    Pong,
    Ready,
    ToChild,
    WorkersLost,
)
from lightserve.utils.process import STOP_SIGNALS, Boot

LAST_WORDS_S = 2.0  # between the first sign that a child ends and its exit; then it is made to


class ChildDiedError(ServerError):
    def __init__(self, child: Child, exit_code: int) -> None:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        words = f": {child.last_words}" if child.last_words else ""
        super().__init__(f"{child.role} died ({how}){words}")
        self.child = child
        self.exit_code = exit_code


class Child:
    """Started with ``start`` and ended with ``kill`` and ``wait``; what it says is found in the fields."""

    def __init__(self, role: str, process: Process, line: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.role = role
        self.pid = process.pid
        self.ready = asyncio.Event()
        self.drained = asyncio.Event()
        self.engine: EngineReady | None = None  # of a worker that is ready
        self.phases: list[Phase] = []
        self.last_words: str | None = None
        self.complaints: asyncio.Queue[WorkersLost] = asyncio.Queue()  # of the router
        self.unanswered = 0  # pings
        self._answered = asyncio.Event()  # since the last ping
        self._process = process
        self._reader, self._writer = line
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, role: str, module: str, boot: Boot, env: Mapping[str, str]) -> Child:
        ours, theirs = socket.socketpair()
        with theirs, _signals_held_back():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                env={**env, **os.environ},  # what the operator sets wins
                pass_fds=[fd for fd in (theirs.fileno(), boot.listen_fd) if fd is not None],
                start_new_session=True,  # Ctrl-C is for the launcher, and a kill reaches what the child started
            )
        try:
            child = cls(role, process, await asyncio.open_connection(sock=ours))
        except asyncio.CancelledError:  # a signal came first, and nobody else knows of this process
            process.kill()
            await process.wait()
            raise
        child._write(boot)
        return child

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._process.returncode

    def send(self, message: ToChild) -> None:
        """Never blocks; a child that is gone does not mind."""
        self._write(message)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.unanswered += 1
        self._answered.clear()
        self.send(Ping())

    async def obeyed(self) -> None:
        """Until it has taken all that it was sent: it answers in order."""
        self.ping()
        await self._answered.wait()

    async def watch(self) -> None:
        """Return when the child has ended with its work done; raise ChildDiedError when it has ended otherwise."""
        exiting = asyncio.ensure_future(self._process.wait())
        try:  # its line and its process end together, or nearly so: neither is waited for alone
            await asyncio.wait({self._listening, exiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({self._listening, exiting}, timeout=LAST_WORDS_S)
            self.kill()
            exit_code = await exiting
        finally:
            exiting.cancel()
        if exit_code or not self.drained.is_set():
            raise ChildDiedError(self, exit_code)

    def kill(self) -> None:
        """It and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def put_down(self, why: str) -> None:
        """Kill it for a reason, which count as its last words if it has said none."""
        self.last_words = self.last_words or f"it was killed: {why}"
        self.kill()

    async def wait(self) -> None:
        """Until a child that was killed is gone."""
        await self._process.wait()
        await self._listening
        self._writer.close()

    async def _listen(self) -> None:
        """Until it has said its last word."""
        decode = msgspec.json.Decoder(FromChild).decode
        try:
            while self.last_words is None and (line := await self._reader.readline()):
                self._take(decode(line))
        except ConnectionError:
            return
        except ValueError as error:  # no message, or no line
            self.last_words = f"what it said makes no sense ({error})"

    def _take(self, message: FromChild) -> None:
        match message:
            case Phase():
                self.phases.append(message)
            case Ready():
                self.ready.set()
            case EngineReady():
                self.engine = message
                self.ready.set()
            case Drained():
                self.drained.set()
            case Failed(words):
                self.last_words = words
            case WorkersLost():
                self.complaints.put_nowait(message)
            case Pong():
                self.unanswered = 0
                self._answered.set()

    def _write(self, message: Boot | ToChild) -> None:
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """What is blocked here stays so in the child until it has chosen to ignore it; no signal is lost to us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
