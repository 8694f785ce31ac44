"""The gateway's end of the link to one engine: one connection. When it ends, the engine is lost until the next one."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from lightserve.ipc.channel import MessageError, make_decoder
from lightserve.ipc.codec import encode
from lightserve.links.curve import MAX_MESSAGE_BYTES, gateway_socket, try_send
from lightserve.links.engine_server import HEARTBEAT_TICKS, SILENT_TICKS, TICK_S
from lightserve.links.keys import GatewayKeys
from lightserve.links.translation import for_other_clock
from lightserve.messages.cluster import (
    DispatchedReq,
    EngineHello,
    EngineToGateway,
    FromEngine,
    GatewayHello,
    Heartbeat,
    LinkRefused,
    ToEngine,
)
from lightserve.messages.output import BatchTokenIdOut, Timelines
from lightserve.messages.step import ReqFailed

HELLO_TIMEOUT_S = 10.0  # longer than a busy engine takes; a machine that is switched off never answers
ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
REASONS: dict[int, str] = {
    zmq.EVENT_CLOSED: "nothing listens there, or it cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the engine does not accept this gateway's key (its gateways.allowed)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it is no engine of LightServe",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the engine has another key than engines.allowed, or is no engine",
}


class LinkLostError(Exception):
    """Why an engine cannot be used now."""


async def first_of(timeout_s: float | None, *works: Any) -> Any:
    """The result of the first of them that ends. One that has read a message goes before those after it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        async with asyncio.timeout(timeout_s):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    except TimeoutError as error:
        raise LinkLostError(f"no answer within {timeout_s:g} s") from error
    finally:
        for task in tasks:
            task.cancel()


class GatewayLink:
    """``open`` it, give it to the dispatcher, and ``run`` it until it is lost."""

    def __init__(self, address: str, keys: GatewayKeys) -> None:
        self.instance = ""  # engine and epoch
        key = keys.key_of(address)
        if key is None:
            raise LinkLostError("engines.allowed has no key for this address")
        self._socket = gateway_socket(keys.secret, key)
        self._monitor = self._socket.get_monitor_socket(ENDED)
        self._socket.connect(address)
        self._decode = make_decoder(EngineToGateway)
        self._inbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._silent_ticks = 0

    async def open(self, hello: GatewayHello) -> EngineHello:
        """Introduce the gateway. Raises LinkLostError if the engine cannot be reached or refuses it."""
        self._send(hello)  # it waits in the socket for the connection
        reply = await self._first_of(self._next(), HELLO_TIMEOUT_S)
        if not isinstance(reply, EngineHello):
            raise LinkLostError(f"its first message was {type(reply).__name__}")
        self.instance = f"{reply.engine_id} {reply.epoch}"
        return reply

    async def run(self) -> None:
        """Raises LinkLostError at the end of the link."""
        await self._first_of(self._read())

    def send(self, message: ToEngine) -> None:
        self._send(message)

    async def recv(self) -> FromEngine:
        return await self._inbox.get()

    def close(self) -> None:
        """The engine notices it at its next heartbeat, and aborts what it has."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)

    async def _first_of(self, work: Any, timeout_s: float | None = None) -> Any:
        """The result of ``work``, unless the link ends before."""
        return await first_of(timeout_s, work, self._watch_connection(), self._watch_silence())

    async def _next(self) -> FromEngine | EngineHello | Heartbeat:
        try:
            message: EngineToGateway = self._decode(await self._socket.recv())
        except MessageError as error:
            raise LinkLostError(str(error)) from error
        self._silent_ticks = 0
        if isinstance(message, LinkRefused):
            raise LinkLostError(message.reason)
        return message

    async def _read(self) -> None:
        while True:
            message = await self._next()
            if isinstance(message, EngineHello):
                raise LinkLostError("it introduced itself again")
            if not isinstance(message, Heartbeat):
                self._inbox.put_nowait(for_other_clock(message) if isinstance(message, Timelines) else message)

    async def _watch_connection(self) -> None:
        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        raise LinkLostError(REASONS.get(event, "the connection was closed"))

    async def _watch_silence(self) -> None:
        """Heartbeats, once the engine has introduced itself."""
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            if not self.instance:
                continue
            ticks += 1
            if ticks % HEARTBEAT_TICKS == 0:
                self._send(Heartbeat())
            self._silent_ticks += 1
            if self._silent_ticks > SILENT_TICKS:
                raise LinkLostError(f"no heartbeat for {SILENT_TICKS * TICK_S:g} s")

    def _send(self, message: Any) -> None:
        raw = encode(message)
        if len(raw) > MAX_MESSAGE_BYTES and isinstance(message, DispatchedReq):
            reason = f"the request takes {len(raw)} bytes; engines take {MAX_MESSAGE_BYTES}"
            failure = ReqFailed(message.request.req_id, 413, reason)
            self._inbox.put_nowait(BatchTokenIdOut(failed=[failure]))
            return
        try_send(self._socket, [raw])  # if the connection has ended, ``run`` notices it
