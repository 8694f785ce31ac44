"""The worker's end of rpyc: requests come in as bytes, replies go out as bytes. See worker_calls.py."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec
import rpyc
from rpyc.core import Channel, SocketStream

from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import RUN, WorkerCall
from lightserve.messages.step import Step, StepResult
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "log_exceptions": False}

GetResult = Callable[[], StepResult]
Launch = Callable[[Step], GetResult]  # starts a step, and returns a function that waits for its result
Handle = Callable[[bytes], bytes | str]  # returns the reply to a request, or the error as text

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class CallHandler(NamedTuple):
    name: str  # of the call
    handle: Handle


def handler(call: WorkerCall[Request, Reply], function: Callable[[Request], Reply]) -> CallHandler:
    """Serve a call with this function, in a thread of its own."""

    def handle(request: bytes) -> bytes | str:
        try:
            return encode(function(call.decode_request(request)))
        except Exception as error:  # a call that fails must not end the worker
            logger.warning("the call %s failed: %s", call.name, error, exc_info=error)
            return f"{type(error).__name__}: {error}"

    return CallHandler(call.name, handle)


class RouterConnection(rpyc.Service):  # type: ignore[misc]  # rpyc is untyped
    """A connection of the router, which first names the call that it is for."""

    def __init__(self, handles: Mapping[str, Handle], unconnected: set[str]) -> None:
        """``unconnected``: the calls without a connection. All connections share the set."""
        self.name = ""
        self._handles = handles
        self._unconnected = unconnected

    def exposed_connect(self, name: str) -> tuple[str, ...] | str:
        """The names of all calls that the worker serves, or why it refuses the connection."""
        if name not in self._handles:
            return f"there is no call {name!r}; there are {', '.join(self._handles)}"
        try:
            self._unconnected.remove(name)
        except KeyError:
            return f"the call {name!r} has a connection already"
        self.name = name
        return tuple(self._handles)

    def exposed_call(self, request: bytes) -> bytes | str:
        return self._handles[self.name](request) if self.name else "the connection has named no call"


class StepConnection:
    """Serves the connection for steps with as many threads as steps may be in flight.

    One thread waits for a result while another reads the next step. Only the thread that holds ``_launching`` reads and
    launches, so steps are launched in the order in which they come.
    """

    def __init__(self, launch: Launch) -> None:
        self.failure: BaseException | None = None
        self._launch = launch
        self._connection: Any = None
        self._launching = threading.Lock()
        self._thread = threading.local()

    def run(self, request: bytes) -> bytes:
        try:
            began_s = time.monotonic()
            collect = self._launch(RUN.decode_request(request))
            launch_s = time.monotonic() - began_s
            self._let_others_launch()
            return encode(msgspec.structs.replace(collect(), launch_s=launch_s))
        except BaseException as error:  # this process reports it; rpyc would raise it in the router
            self.failure = self.failure or error
            self._connection.close()
            return b""

    def serve(self, connection: Any) -> None:
        """Until the router closes the connection or a step fails."""
        self._connection = connection
        try:
            while not connection.closed:
                self._launching.acquire()
                self._thread.is_launching = True
                try:
                    connection.serve(None)
                finally:
                    self._let_others_launch()
        except EOFError:  # either side has closed it
            pass
        except RuntimeError:  # rpyc releases its lock twice if another thread closes it while this one sends
            if not connection.closed:
                raise

    def _let_others_launch(self) -> None:
        if self._thread.is_launching:
            self._thread.is_launching = False
            self._launching.release()


class StepServer:
    """Listens on a unix socket for the only router, which opens a connection for each call in any order."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(32)  # more than the router has connections
        self._for_steps: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def serve(self, launch: Launch, depth: int = 1, handlers: Sequence[CallHandler] = ()) -> None:
        """Run the router's steps, up to ``depth`` in flight, until it closes the connection or a step fails.

        Each of ``handlers`` serves the connection for its call in a thread of its own: a step never waits behind it.
        """
        steps = StepConnection(launch)
        handles: dict[str, Handle] = {RUN.name: steps.run, **dict(handlers)}
        threading.Thread(target=self._accept, args=(handles,), daemon=True).start()
        connection = self._for_steps.get()
        threads = [threading.Thread(target=steps.serve, args=(connection,), daemon=True) for _ in range(depth - 1)]
        for thread in threads:
            thread.start()
        steps.serve(connection)
        for thread in threads:
            thread.join()
        with suppress(OSError):  # not every system can shut a listener down
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread still waits for connections
        if steps.failure is not None:
            raise steps.failure

    def _accept(self, handles: Mapping[str, Handle]) -> None:
        unconnected = set(handles)
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # shut down
                return
            service = RouterConnection(handles, unconnected)
            threading.Thread(target=self._serve_connection, args=(sock, service), daemon=True).start()

    def _serve_connection(self, sock: socket.socket, service: RouterConnection) -> None:
        connection = service._connect(Channel(SocketStream(sock), compress=False), RPYC_CONFIG)
        with suppress(EOFError):  # the router has closed it
            while not (service.name or connection.closed):
                connection.serve(None)
            if service.name == RUN.name:
                self._for_steps.put(connection)
            else:
                connection.serve_all()
