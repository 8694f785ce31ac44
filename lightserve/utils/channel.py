"""One-way typed message pipes between processes: ZMQ over ipc, msgpack on the wire, one message type a receiver."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

M = TypeVar("M")


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
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    async def recv(self) -> M:
        message: M = self._decode(await self._socket.recv())
        return message

    def close(self) -> None:
        self._socket.close(linger=0)
