"""A node's end of the link to node 0: one connection. When it ends, the ranks of this node end too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from lightserve.cluster.nodes.first_node import SILENT_TICKS, TICK_S
from lightserve.cluster.nodes.streams import Endpoint, Streams, Target
from lightserve.ipc.channel import MessageError, make_decoder
from lightserve.ipc.codec import encode
from lightserve.links.curve import node_socket, try_send
from lightserve.links.gateway_link import ENDED, HELLO_TIMEOUT_S, LinkLostError, first_of
from lightserve.links.keys import NODE_SECRET
from lightserve.messages.cluster import Heartbeat
from lightserve.messages.nodes import NodeAccepted, NodeHello, NodeRefused, OpenStream, ToFirstNode, ToNode
from lightserve.utils import net

REASONS: dict[int, str] = {
    zmq.EVENT_CLOSED: "nothing listens there, or it cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: f"node 0 does not accept the key of this node ({NODE_SECRET})",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it is no node of LightServe",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: f"node 0 has another key ({NODE_SECRET}), or is no node of LightServe",
}


class NodeRefusedError(Exception):
    """Node 0 will not accept this node, however often it asks."""


class NodeLink:
    """``open`` it, and ``run`` it until it is lost."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, connect: Callable[[Target], Callable[[], Awaitable[Endpoint]]]
    ) -> None:
        """``connect`` returns how to connect the target of a stream, or raises MessageError if there is none."""
        self._connect = connect
        self._socket = node_socket(secret)
        self._monitor = self._socket.get_monitor_socket(ENDED)
        self._socket.connect(net.numeric_tcp(*address))
        self._decode = make_decoder(ToNode)
        self._silent_ticks = 0
        self.streams = Streams(self._send, first_number=1)

    async def open(self, hello: NodeHello) -> None:
        """Raises LinkLostError if node 0 cannot be reached, and NodeRefusedError if it refuses this node."""
        self._send(hello)  # it waits in the socket for the connection
        reply = await first_of(HELLO_TIMEOUT_S, self._next(), self._watch_connection())
        if not isinstance(reply, NodeAccepted):
            raise LinkLostError(f"its first message was {type(reply).__name__}")

    async def run(self) -> None:
        """Raises LinkLostError at the end of the link."""
        await first_of(None, self._read(), self._watch_connection(), self._watch_silence())

    async def close(self) -> None:
        await self.streams.close()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)

    async def _next(self) -> ToNode:
        try:
            message: ToNode = self._decode(await self._socket.recv())
        except MessageError as error:
            raise LinkLostError(str(error)) from error
        self._silent_ticks = 0
        if isinstance(message, NodeRefused):
            raise LinkLostError(message.reason) if message.may_retry else NodeRefusedError(message.reason)
        return message

    async def _read(self) -> None:
        while True:
            message = await self._next()
            try:
                self._handle(message)
            except MessageError as error:
                raise LinkLostError(str(error)) from error

    def _handle(self, message: ToNode) -> None:
        if isinstance(message, OpenStream):
            self.streams.accept(message.stream, self._connect(message.target))
        elif isinstance(message, NodeAccepted | NodeRefused):
            raise MessageError("node 0 accepted this node again")
        elif not isinstance(message, Heartbeat):
            self.streams.handle(message)

    async def _watch_connection(self) -> None:
        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        raise LinkLostError(REASONS.get(event, "the connection was closed"))

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._send(Heartbeat())
            self._silent_ticks += 1
            if self._silent_ticks > SILENT_TICKS:
                raise LinkLostError(f"no heartbeat for {SILENT_TICKS * TICK_S:g} s")

    def _send(self, message: ToFirstNode) -> None:
        if not self._socket.closed:
            try_send(self._socket, [encode(message)])  # if the connection has ended, ``run`` notices it
