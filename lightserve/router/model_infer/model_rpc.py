"""The worker's end of rpyc: steps come in as bytes, tokens go out as bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import rpyc
from rpyc.core import Channel, SocketStream

from lightserve.io_struct import Step, TokenOut

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "log_exceptions": False}

RunStep = Callable[[Step], list[TokenOut]]

_decode_step = msgspec.msgpack.Decoder(Step).decode
_encode_tokens = msgspec.msgpack.Encoder().encode


class ModelRpc(rpyc.Service):  # type: ignore[misc]  # rpyc is untyped
    def __init__(self, run: RunStep) -> None:
        self.failure: BaseException | None = None
        self._run = run

    def on_connect(self, connection: Any) -> None:
        self._connection = connection

    def exposed_run(self, command: bytes) -> bytes:
        try:
            return _encode_tokens(self._run(_decode_step(command)))
        except BaseException as error:  # this process's to tell; rpyc would raise it in the router
            self.failure = error
            self._connection.close()
            return b""


class StepServer:
    """Listens on a unix socket for the one router there is."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(1)

    def serve(self, run: RunStep) -> None:
        """Run the router's steps on this thread, one after the other, until it hangs up or a step fails."""
        connected, _ = self._listener.accept()
        rpc = ModelRpc(run)
        connection = rpc._connect(Channel(SocketStream(connected)), RPYC_CONFIG)
        try:
            while not connection.closed:
                connection.serve(None)
        except EOFError:  # either side hung up
            pass
        if rpc.failure is not None:
            raise rpc.failure
