"""A connection between two transfer backends, as bytes. One thread uses it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

TIMEOUT_S = 5.0  # of a handshake, a write, and of a read within a frame
TIMEVAL = struct.pack("ll", int(TIMEOUT_S), 0)
BUFFER_BYTES = 1 << 22
MAX_BUFFERS = 512  # of one call; the kernel takes 1024
ENDED = "the connection ended"


class KvTransferError(Exception):
    """The other side is a stranger, computes other KV, or has closed the connection."""


class ReadTimeoutError(KvTransferError):
    """Blocks were not read in time, and may still be written to until ``wait`` returns."""

    def __init__(self, message: str, wait: Callable[[], None]) -> None:
        super().__init__(message)
        self.wait = wait


class Pipe(Protocol):
    def send_all(self, buffers: Sequence[memoryview]) -> None: ...

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all of them."""

    def read_or_idle(self, into: memoryview) -> int:
        """Bytes that were read; 0: there are none yet."""

    def has_ended(self) -> bool:
        """For a sender: a receiver sends nothing after the handshake, so anything that can be read is the end."""

    def close(self) -> None: ...


class SocketPipe:
    """The kernel has the timeout, not Python: then one call moves a whole frame.

    Between two calls, this thread might wait for those that launch steps.
    """

    def __init__(self, sock: socket.socket) -> None:
        tune(sock)
        sock.settimeout(None)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, TIMEVAL)
        self._socket = sock

    def send_all(self, buffers: Sequence[memoryview]) -> None:
        for begin in range(0, len(buffers), MAX_BUFFERS):
            left = list(buffers[begin : begin + MAX_BUFFERS])
            while left:
                left = _after(left, self._socket.sendmsg(left))

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        for begin in range(0, len(buffers), MAX_BUFFERS):
            left = [buffer for buffer in buffers[begin : begin + MAX_BUFFERS] if len(buffer)]
            while left:
                count, *_ = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)
                if not count:
                    raise KvTransferError(ENDED)
                left = _after(left, count)

    def read_or_idle(self, into: memoryview) -> int:
        try:
            count = self._socket.recv_into(into)
        except BlockingIOError:  # SO_RCVTIMEO
            return 0
        if not count:
            raise KvTransferError(ENDED)
        return count

    def has_ended(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()


def send(pipe: Pipe, data: bytes) -> None:
    pipe.send_all([memoryview(data)])


def read(pipe: Pipe, size: int) -> bytes:
    data = bytearray(size)
    pipe.read_into([memoryview(data)])
    return bytes(data)


def tune(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of these after so many bytes."""
    at = 0
    while at < len(buffers) and count >= len(buffers[at]):
        count -= len(buffers[at])
        at += 1
    left = buffers[at:]
    return [left[0][count:], *left[1:]] if left else []
