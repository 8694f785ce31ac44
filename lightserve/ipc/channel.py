"""One-way typed channels between processes: ZMQ over ipc, msgpack on the wire, one message type per receiver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from lightserve.errors import InvalidRequestError
from lightserve.ipc.codec import encode, make_decode

M = TypeVar("M")


class MessageError(Exception):
    """Bytes that are not a message of the receiver's type: a bug of ours, or another program writes into the socket."""


def make_decoder(message_type: Any) -> Callable[[bytes], Any]:
    """A function that decodes bytes to a message or raises MessageError."""
    plain = make_decode(message_type)

    def decode(raw: bytes) -> Any:
        try:
            return plain(raw)
        except (ValueError, InvalidRequestError) as error:  # ValueError: msgspec's errors, and text that is not UTF-8
            raise MessageError(f"received {len(raw)} bytes that are not a valid message: {error}") from error

    return decode


class Sender(Generic[M]):
    """Never blocks and never drops: messages that the receiver has not read wait in memory, in order."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)  # unlimited: the router limits the number of requests instead
        self._socket.connect(address)

    def send(self, message: M) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(linger=0)


class Receiver(Generic[M]):
    """Raises MessageError on anything that is not a message of its type."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decode = make_decoder(message_type)

    async def recv(self) -> M:
        message: M = self._decode(await self._socket.recv())
        return message

    def close(self) -> None:
        self._socket.close(linger=0)
