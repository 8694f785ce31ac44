"""A stream of rpyc that never waits for who should read it."""

from __future__ import annotations

import asyncio
import socket

from rpyc.core.stream import SocketStream


class LoopStream(SocketStream):  # type: ignore[misc]  # rpyc is untyped
    """What the socket does not take at once waits here, and the event loop sends it when there is room.

    A worker reads while it launches nothing, and the step of a long prompt is larger than what a socket holds: rpyc
    would stop the router until then, and after the seconds that connecting may take count the worker as gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # that of connecting; no send waits, and what is read has begun to come
        super().__init__(sock)
        self._loop = asyncio.get_running_loop()
        self._unsent = b""

    def write(self, data: bytes) -> None:
        if self._unsent:  # in order
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
        self._forget_rest()
        super().close()

    def _send_rest(self) -> None:
        try:
            left = self._unsent[self._send(self._unsent) :]
        except OSError:  # who reads finds out as well, and knows whom to tell
            left = b""
        if left:
            self._unsent = left
        else:
            self._forget_rest()

    def _forget_rest(self) -> None:
        if self._unsent:
            self._loop.remove_writer(self.sock.fileno())
            self._unsent = b""

    def _send(self, data: bytes) -> int:
        """How much of it the socket took."""
        try:
            sent: int = self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        return sent
