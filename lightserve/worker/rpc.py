"""The worker's end of rpyc: steps come in as bytes, results go out as bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import rpyc
from rpyc.core import Channel, SocketStream

from lightserve.io_struct import Step, StepResult

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "log_exceptions": False}

Collect = Callable[[], StepResult]
Launch = Callable[[Step], Collect]  # begins a step; what it returns waits for the tokens

_decode_step = msgspec.msgpack.Decoder(Step).decode
_encode_result = msgspec.msgpack.Encoder().encode


class ModelRpc(rpyc.Service):  # type: ignore[misc]  # rpyc is untyped
    """As many threads serve the connection as steps may be under way: one waits for its tokens, another reads on.

    Only the thread that holds ``_turn`` reads and launches, so steps are launched in the order in which they come.
    """

    def __init__(self, launch: Launch) -> None:
        self.failure: BaseException | None = None
        self._launch = launch
        self._turn = threading.Lock()
        self._has_turn = threading.local()

    def on_connect(self, connection: Any) -> None:
        self._connection = connection

    def exposed_run(self, command: bytes) -> bytes:
        try:
            collect = self._launch(_decode_step(command))
            self._pass_turn()
            return _encode_result(collect())
        except BaseException as error:  # this process's to tell; rpyc would raise it in the router
            self.failure = self.failure or error
            self._connection.close()
            return b""

    def serve(self) -> None:
        """Until the router hangs up or a step fails."""
        try:
            while not self._connection.closed:
                self._turn.acquire()
                self._has_turn.value = True
                try:
                    self._connection.serve(None)
                finally:
                    self._pass_turn()
        except EOFError:  # either side hung up
            pass

    def _pass_turn(self) -> None:
        if self._has_turn.value:
            self._has_turn.value = False
            self._turn.release()


class StepServer:
    """Listens on a unix socket for the one router there is."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(1)

    def serve(self, launch: Launch, depth: int = 1) -> None:
        """Run the router's steps, ``depth`` under way at once, until it hangs up or a step fails."""
        connected, _ = self._listener.accept()
        rpc = ModelRpc(launch)
        rpc._connect(Channel(SocketStream(connected), compress=False), RPYC_CONFIG)
        helpers = [threading.Thread(target=rpc.serve, daemon=True) for _ in range(depth - 1)]
        for helper in helpers:
            helper.start()
        rpc.serve()
        for helper in helpers:
            helper.join()
        if rpc.failure is not None:
            raise rpc.failure
