"""One-way typed message pipes between processes: ZMQ over ipc, msgpack on the wire, one message type a receiver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from lightserve.errors import InvalidRequestError

M = TypeVar("M")


class MessageError(Exception):
    """Bytes that are no message of the receiver's type: a fault of ours, or of whoever else writes into the socket."""


def decoder_of(message_type: Any) -> Callable[[bytes], Any]:
    """Bytes to a message, or MessageError."""
    plain = msgspec.msgpack.Decoder(message_type).decode

    def decode(raw: bytes) -> Any:
        try:
            return plain(raw)
        except (ValueError, InvalidRequestError) as error:  # ValueError: msgspec's own are, and text that is no UTF-8
            raise MessageError(f"{len(raw)} bytes are no message: {error}") from error

    return decode


class Sender(Generic[M]):
    """Never blocks and never drops: what the receiver has not read yet waits in memory, in order."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)  # the router bounds what is under way, request by request
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: M) -> None:
        self._socket.send(self._encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(linger=0)


class Receiver(Generic[M]):
    """Refuses, loudly, what is not a message of its type."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decode = decoder_of(message_type)

    async def recv(self) -> M:
        message: M = self._decode(await self._socket.recv())
        return message

    def close(self) -> None:
        self._socket.close(linger=0)
