"""The link between the dispatcher and one engine: typed messages both ways, in order.

A link belongs to one epoch of an engine. The router that replaces a dead one gets a new link, so no message of one
epoch is read in another. On one machine the link is two ZMQ sockets over ipc, in the server's run directory. To another
machine it is one socket over TCP: see links/gateway_link.py.
"""

from __future__ import annotations

from typing import Protocol

from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.cluster import FromEngine, ToEngine


class EngineLink(Protocol):
    instance: str  # the same for two links exactly if they lead to the same router process

    def send(self, message: ToEngine) -> None:
        """Never blocks."""

    async def recv(self) -> FromEngine:
        """The next message of the engine."""
        ...

    def close(self) -> None:
        """Messages that are not read or not sent are dropped."""


class IpcLink:
    def __init__(self, to_engine: str, from_engine: str) -> None:
        self.instance = to_engine
        self._sender: Sender[ToEngine] = Sender(to_engine)
        self._receiver: Receiver[FromEngine] = Receiver(from_engine, FromEngine)

    def send(self, message: ToEngine) -> None:
        self._sender.send(message)

    async def recv(self) -> FromEngine:
        return await self._receiver.recv()

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
