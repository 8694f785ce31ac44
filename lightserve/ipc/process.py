"""A child process of the launcher, seen from the child: how it starts, talks to the launcher, and exits.

The launcher gives every child one end of a socket pair, the control socket; its file descriptor is the only argument.
Lines of JSON cross it: first a ChildConfig, then ToChild one way and FromChild the other. When it closes, the launcher
has exited. ``server/child_process.py`` is the launcher's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import msgspec

from lightserve.config import ServerConfig
from lightserve.errors import LightserveError, with_docs
from lightserve.ipc.child_setup import prepare_child
from lightserve.messages.control import ChildFailed, FromChild, Ping, Pong, ToChild
from lightserve.messages.request import HTTP_PROCESS_BITS
from lightserve.utils.logger import init_logger, is_json, name_engine
from lightserve.utils.net import address_to, parse_tcp, tcp_address

logger = init_logger(__name__)

ENGINE_ROLES = frozenset({"router", "model worker", "null worker"})  # there is a process for each engine
EXIT_CRASH = 1
EXIT_CONFIG_ERROR = 2  # the operator can fix it: a flag, a file, a port

_MESSAGE_LEN = 1000  # characters of an error: one line, far below the launcher's limit for a line
_READ_BYTES = 1 << 16


class ChildConfig(msgspec.Struct, frozen=True):
    """The first message to a child: its configuration."""

    config: ServerConfig
    run_dir: str  # for sockets; only this user can open it, and it is removed when the server ends
    index: int = 0  # among the processes of its role, of an engine; the rank of a worker
    listen_fd: int | None = None  # a socket that listens: of HTTP processes, of the nodes process, and for the store
    generation: int = 0  # of workers and HTTP processes: how many times they were replaced before
    engine: int = 0  # of routers and workers: which of --dp
    epoch: int = 0  # of an engine: how many times its router was replaced before
    store_port: int | None = None  # on loopback: where ranks on several nodes find each other
    arena_fd: int | None = None  # memory for the embeddings of images; None: requests have none
    arena_fds: tuple[int, ...] = ()  # of the nodes process: those of all engines
    arena_path: str | None = None  # of ranks on other nodes, in its place: the socket where they read them
    # A pipe that the first encoder closes when it has taken its memory on the device, where workers take what is left:
    # its end of the pipe, or theirs. None: nobody waits.
    encoder_fd: int | None = None

    @property
    def fds(self) -> list[int]:
        """The process inherits them."""
        return [fd for fd in (self.listen_fd, self.arena_fd, *self.arena_fds, self.encoder_fd) if fd is not None]

    @property
    def device(self) -> int:
        """Number of a worker's device: its rank among those of this machine, after the engines before it.

        Encoders beyond the number of ranks share the devices.
        """
        ranks = self.config.ranks_per_node
        return self.engine % self.config.engines_per_node * ranks + self.index % ranks

    @property
    def number(self) -> int:
        """Of this process among those with its role."""
        return self.engine * self.config.worker.num_ranks + self.index

    @property
    def http_process(self) -> int:
        """The number of an HTTP process in the ids of its requests.

        A replacement has another number, so it ignores the text of requests that it does not know. The remainder by the
        number of HTTP processes is the index.
        """
        count = self.config.http.num_processes
        return self.index + count * (self.generation % ((1 << HTTP_PROCESS_BITS) // count))

    def path(self, name: str) -> str:
        return f"{self.run_dir}/{name}"

    def worker_path(self, rank: int, generation: int) -> str:
        """The socket of a worker. Each generation has its own, so that a late client cannot connect to the next one."""
        return self.engine_path(f"worker-{rank}-{generation}")

    @property
    def rendezvous_path(self) -> str:
        """The file in which the ranks of this machine find each other."""
        return f"{self.engine_path('tp')}.{self.generation}"

    def engine_path(self, name: str) -> str:
        """A path that no other engine uses."""
        return self.path(f"{name}.{self.engine}" if self.engine else name)

    @property
    def parts_folder(self) -> str | None:
        """Where ranks of another node write their parts of a profile; None: the router says where."""
        return self.run_dir if self.config.is_other_node else None

    @property
    def role(self) -> str:
        """Of the engine."""
        return self.config.cluster.role_of(self.engine)

    def kv_address(self, rank: int, generation: int) -> str:
        """Where a worker of this node receives KV of prefill engines.

        With --dp a socket of its own, as ``worker_path``. The host of --listen is that of node 0: another node has the
        address from which it reaches that one.
        """
        cluster = self.config.cluster
        if cluster.listen is None:
            return f"unix://{self.engine_path(f'kv-{rank}-{generation}')}"
        if cluster.kv_listen is not None and cluster.kv_listen.startswith("unix://"):
            return f"{cluster.kv_listen}-{rank}" if rank else cluster.kv_listen
        host, port = parse_tcp(cluster.kv_listen or cluster.listen)
        if cluster.kv_listen is None and self.config.is_other_node:
            host = address_to(cluster.master_addr or "")
        return tcp_address(host, port + rank + (cluster.kv_listen is None))

    def to_engine(self, engine: int, epoch: int) -> str:
        """Where the router of an engine receives. A router that replaces another one gets none of its messages."""
        return self.address(f"to-engine-{engine}-{epoch}")

    def from_engine(self, engine: int, epoch: int) -> str:
        return self.address(f"from-engine-{engine}-{epoch}")

    def encoder_address(self, encoder: int, generation: int) -> str:
        """Where an encoder of an engine receives images."""
        return self.address(f"encoder-{self.engine}-{self.epoch}-{encoder}-{generation}")

    @property
    def router_address(self) -> str:
        """Where the router of the engine receives."""
        has_dispatcher = self.config.cluster.dp > 1 or self.config.cluster.listen is not None
        return self.to_engine(self.engine, self.epoch) if has_dispatcher else self.address("router")

    def address(self, name: str) -> str:
        """The address of a ZMQ socket."""
        return f"ipc://{self.path(name)}"


class LauncherConnection:
    """The connection to the launcher. When the launcher exits, the child exits too, whatever it is doing."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sending = threading.Lock()
        self._inbox: asyncio.Queue[ToChild] = asyncio.Queue()

    def send(self, message: FromChild) -> None:
        """May be called from any thread. Messages to a launcher that has exited are dropped."""
        with self._sending, contextlib.suppress(OSError):
            self._control.sendall(msgspec.json.encode(message) + b"\n")

    async def recv(self) -> ToChild:
        return await self._inbox.get()

    def watch(self, lines: Iterator[bytes], loop: asyncio.AbstractEventLoop | None) -> None:
        """Pass messages to the event loop, in a thread: it detects the launcher's exit even while the loop is busy."""
        threading.Thread(target=self._watch, args=(lines, loop), name="launcher", daemon=True).start()

    def _watch(self, lines: Iterator[bytes], loop: asyncio.AbstractEventLoop | None) -> None:
        decode = msgspec.json.Decoder(ToChild).decode
        for line in lines:
            message = decode(line)
            if loop is None:
                if isinstance(message, Ping):
                    self.send(Pong())
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._handle, message)
        _exit(EXIT_CRASH)  # without a launcher there is nobody to report to

    def _handle(self, message: ToChild) -> None:
        """Runs in the event loop, so that only a loop that runs answers a Ping."""
        if isinstance(message, Ping):
            self.send(Pong())
        else:
            self._inbox.put_nowait(message)


Main = Callable[[ChildConfig, LauncherConnection], Coroutine[Any, Any, None] | None]


def run_child(role: str, main: Main) -> NoReturn:
    """Run ``main``, async (under uvloop) or synchronous, as a child of the launcher, and exit the process.

    An exception is sent to the launcher as ChildFailed. The exit code is 2, without a traceback, for a LightserveError,
    and 1, with a traceback, for any other. A synchronous function can send but not receive.
    """
    control = _control_socket(sys.argv)
    lines = _lines(control)
    launcher = LauncherConnection(control)
    first = next(lines, None)
    if first is None:  # the launcher exited while this process was importing
        _exit(EXIT_CRASH)
    try:
        child_config = msgspec.json.decode(first, type=ChildConfig)
        if role in ENGINE_ROLES and child_config.config.cluster.dp > 1:
            name_engine(child_config.engine)
        prepare_child(role, child_config.engine if role == "router" else child_config.number)
        _run(main, child_config, launcher, lines)
    except BaseException as error:
        _exit(_report(error, launcher))
    _exit(0)


def _control_socket(argv: list[str]) -> socket.socket:
    if len(argv) != 2 or not argv[1].isdecimal():
        sys.exit(
            "this module is one process of the server; start the server with: python -m lightserve.server.api_server"
        )
    os.set_inheritable(int(argv[1]), False)  # a compiler that we start must not keep it open
    return socket.socket(fileno=int(argv[1]))


def _lines(control: socket.socket) -> Iterator[bytes]:
    buffer = b""
    with contextlib.suppress(OSError):
        while chunk := control.recv(_READ_BYTES):
            *whole, buffer = (buffer + chunk).split(b"\n")
            yield from whole


def _run(main: Main, child_config: ChildConfig, launcher: LauncherConnection, lines: Iterator[bytes]) -> None:
    if not inspect.iscoroutinefunction(main):
        launcher.watch(lines, loop=None)
        main(child_config, launcher)
        return
    import uvloop  # here, because workers start faster without it

    async def run() -> None:
        launcher.watch(lines, asyncio.get_running_loop())
        work = main(child_config, launcher)
        if work is not None:
            await work

    uvloop.run(run())


def _report(error: BaseException, launcher: LauncherConnection) -> int:
    """Send the launcher one line and print the traceback. Return the exit code."""
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    message = error_line(cause)
    if isinstance(cause, LightserveError):
        launcher.send(ChildFailed(message))
        return EXIT_CONFIG_ERROR
    if is_json():
        logger.error("%s: %s", type(cause).__name__, message, exc_info=error)
    else:
        traceback.print_exception(error)
    launcher.send(ChildFailed(f"{type(cause).__name__}: {message}"))
    return EXIT_CRASH


def error_line(error: BaseException) -> str:
    """The error for the operator: one line, and the page that explains more, if there is one."""
    return with_docs(error, one_line(error))


def one_line(error: BaseException) -> str:
    """The error's text as one printable line: it may quote a damaged file."""
    printable = "".join(char if char.isprintable() else " " for char in str(error))
    return " ".join(printable.split())[:_MESSAGE_LEN]


def _exit(code: int) -> NoReturn:
    """Exit at once: neither threads nor sockets with unsent messages can delay it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
