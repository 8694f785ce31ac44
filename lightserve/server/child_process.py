"""One child process of the launcher, seen from the launcher: start, control connection, heartbeat, exit.

``ipc/process.py`` is the other side: the same connection, seen from the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec

from lightserve.errors import ServerError
from lightserve.ipc.child_setup import STOP_SIGNALS
from lightserve.ipc.process import ChildConfig
from lightserve.messages.control import (
    ChildFailed,
    Drained,
    EngineInfo,
    FromChild,
    Ping,
    Pong,
    Ready,
    StartupPhase,
    StartupProgress,
    StartWorkers,
    StopWorkers,
    ToChild,
    WorkersLost,
)

EXIT_GRACE_S = 2.0  # from the first evidence that a child is exiting until the launcher kills it


class ChildDiedError(ServerError):
    def __init__(self, child: ChildProcess, exit_code: int) -> None:
        cause = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        details = f": {child.exit_message}" if child.exit_message else ""
        super().__init__(f"{child.role} died ({cause}){details}")
        self.child = child
        self.exit_code = exit_code


class ProcessHandle(Protocol):
    """A process here or on another machine."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


class ChildProcess:
    """Create it with ``start``; end it with ``kill`` and ``wait``. The fields hold what the child has sent so far."""

    def __init__(
        self, role: str, process: ProcessHandle, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        self.role = role
        self.pid = process.pid
        self.ready = asyncio.Event()
        self.summary = ""  # for the banner
        self.drained = asyncio.Event()
        self.engine: EngineInfo | None = None  # set when a model worker is ready
        self.phases: list[StartupPhase] = []
        self.show_progress: Callable[[StartupProgress], None] | None = None  # of its startup
        self.exit_message: str | None = None  # the child's own error, or the reason why the launcher killed it
        self.worker_reports: asyncio.Queue[WorkersLost | StopWorkers | StartWorkers] = asyncio.Queue()  # of the router
        self.is_node_missing = False  # of a rank on another node: that did not come in time
        self.missed_heartbeats = 0  # pings without a pong
        self._pong_received = asyncio.Event()  # since the last ping
        self._process = process
        self._reader, self._writer = connection
        self._receiving = asyncio.create_task(self._receive())

    @classmethod
    async def start(cls, role: str, module: str, child_config: ChildConfig, env: Mapping[str, str]) -> ChildProcess:
        process, reader, writer = await spawn(module, child_config, env)
        return cls(role, process, (reader, writer))

    @property
    def exit_code(self) -> int | None:
        """None while the process runs. A negative code is the signal that ended it."""
        return self._process.returncode

    def send(self, message: ToChild) -> None:
        """Never blocks. Messages to a child that has exited are dropped."""
        self._write(message)

    def ping(self) -> None:
        """Request a heartbeat."""
        self.missed_heartbeats += 1
        self._pong_received.clear()
        self.send(Ping())

    async def wait_processed(self) -> None:
        """Wait until the child has read every message sent so far: it handles them in order."""
        self.ping()
        await self._pong_received.wait()

    async def wait_drained(self) -> None:
        """Wait until it has no request: it has finished all, or has exited. One that is starting has none."""
        if not self.ready.is_set():
            return
        draining = asyncio.ensure_future(self.drained.wait())
        try:
            await asyncio.wait({draining, self._receiving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()

    async def watch(self) -> None:
        """Return when the child exits with code 0 after it drained. Raise ChildDiedError on any other exit."""
        exiting = asyncio.ensure_future(self._process.wait())
        try:  # the connection and the process end almost together; after the first, the second gets EXIT_GRACE_S
            await asyncio.wait({self._receiving, exiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({self._receiving, exiting}, timeout=EXIT_GRACE_S)
            self.kill()
            exit_code = await exiting
        finally:
            exiting.cancel()
        if exit_code or not self.drained.is_set():
            raise ChildDiedError(self, exit_code)

    def kill(self, reason: str | None = None) -> None:
        """Kill the child and every process it started. ``reason`` is reported unless the child sent an error itself."""
        if reason is not None:
            self.exit_message = self.exit_message or f"it was killed: {reason}"
        self._kill()

    def _kill(self) -> None:
        kill_group(self._process)

    async def wait(self) -> None:
        """Wait until a killed child has exited."""
        await self._process.wait()
        await self._receiving
        self._writer.close()

    async def _receive(self) -> None:
        """Read messages until the child reports an error or closes the connection."""
        decode = msgspec.json.Decoder(FromChild).decode
        try:
            while self.exit_message is None and (line := await self._reader.readline()):
                self._handle(decode(line))
        except ConnectionError:
            return
        except ValueError as error:  # not a message, or a line longer than the reader's limit
            self.exit_message = f"it sent an invalid message ({error})"

    def _handle(self, message: FromChild) -> None:
        match message:
            case StartupPhase():
                self.phases.append(message)
            case StartupProgress():
                if self.show_progress is not None:
                    self.show_progress(message)
            case Ready():
                self.summary = message.summary
                self.ready.set()
            case EngineInfo():
                self.engine = message
                self.ready.set()
            case Drained():
                self.drained.set()
            case ChildFailed(error):
                self.exit_message = error
            case WorkersLost() | StopWorkers() | StartWorkers():
                self.worker_reports.put_nowait(message)
            case Pong():
                self.missed_heartbeats = 0
                self._pong_received.set()

    def _write(self, message: ToChild) -> None:
        if not self._writer.is_closing():
            self._writer.write(json_line(message))


async def spawn(
    module: str, child_config: ChildConfig, env: Mapping[str, str]
) -> tuple[Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """A new process that runs ``module`` and has its config, and the control connection to it."""
    ours, theirs = socket.socketpair()
    with theirs, _stop_signals_blocked():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            env={**env, **os.environ},  # the operator's environment takes precedence
            pass_fds=[theirs.fileno(), *child_config.fds],
            start_new_session=True,  # Ctrl-C reaches only the launcher, and killpg reaches the child's own children
        )
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except asyncio.CancelledError:  # a stop signal arrived, and nobody else has a reference to this process
        process.kill()
        await process.wait()
        raise
    writer.write(json_line(child_config))
    return process, reader, writer


def kill_group(process: ProcessHandle) -> None:
    """Kill a process and every process it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def json_line(message: ChildConfig | ToChild | FromChild) -> bytes:
    """A message as it crosses a control connection."""
    return msgspec.json.encode(message) + b"\n"


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """A child inherits the blocked signals and unblocks them once it ignores them. Ours stay pending meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
