"""An rpyc stream whose sends never block the event loop."""

from __future__ import annotations

import asyncio
import socket

from rpyc.core.stream import SocketStream


class LoopStream(SocketStream):  # type: ignore[misc]  # rpyc is untyped
    """Keeps what the socket does not take at once; the event loop sends it as soon as there is room.

    A worker does not read while it launches a step, and the step of a long prompt is larger than a socket's buffer.
    rpyc would block the router until then, and would count the worker as lost after the timeout for connecting.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.settimeout(None)  # rpyc's timeout is for connecting; sends do not block, reads happen when data is there
        super().__init__(sock)
        self._loop = loop
        self._unsent = b""

    def write(self, data: bytes) -> None:
        if self._unsent:  # keeps the order
            self._unsent += data
            return
        try:
            self._unsent = data[self._send(data) :]
        except OSError as error:
            self.close()
            raise EOFError(error) from error
        if self._unsent:
            self._loop.add_writer(self.sock.fileno(), self._send_rest)

    def close(self) -> None:
        self._discard_rest()
        super().close()

    def _send_rest(self) -> None:
        try:
            rest = self._unsent[self._send(self._unsent) :]
        except OSError:  # the reader of this connection notices the error too, and handles it
            rest = b""
        if rest:
            self._unsent = rest
        else:
            self._discard_rest()

    def _discard_rest(self) -> None:
        if self._unsent:
            self._loop.remove_writer(self.sock.fileno())
            self._unsent = b""

    def _send(self, data: bytes) -> int:
        """Returns how many bytes the socket took."""
        try:
            sent: int = self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        return sent
