"""ZMQ sockets over TCP with CURVE: both ends are authenticated, and everything between them is encrypted."""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from lightserve.errors import ServerError
from lightserve.links.keys import ALLOWED_GATEWAYS, EngineKeys
from lightserve.utils import net

# CURVE encrypted 30 MB/s on a busy Neoverse N1: heartbeats behind a larger message would be late. A prompt of a million
# tokens takes 4 MB, log-probabilities of one of 100,000 tokens, 20 of each, 16 MB. A peer that sends more is
# disconnected.
MAX_MESSAGE_BYTES = 16 << 20
MAX_NODE_MESSAGE_BYTES = 1 << 20  # nodes send byte streams in pieces of 64 KiB
MAX_UNREAD = 10_000  # messages, one or two for each step, that a gateway has not read before its engine drops it
HANDSHAKE_MS = 10_000  # a connection that has not introduced itself is closed
ALIVE_MS, ALIVE_TIMEOUT_MS = 1_000, 5_000  # ZMQ's own probes: they close connections of machines that are gone
LOG_INTERVAL_S = 60.0
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # of ZeroMQ RFC 27
ZAP_DOMAIN = "lightserve"
ZAP_VERSION = b"1.0"

AsyncSocket = zmq.asyncio.Socket


def engine_socket(address: str, keys: EngineKeys) -> AsyncSocket:
    """Listens. An ``AllowedKeys`` must run already: without it, ZMQ accepts every key."""
    return _listening(f"--listen {address}", net.parse_tcp(address), keys.secret, MAX_MESSAGE_BYTES)


def gateway_socket(secret: bytes, engine_key: bytes) -> AsyncSocket:
    """Connects once: a connection that ends is not replaced, so that no message of it reaches the next one."""
    return _connecting(secret, engine_key, MAX_MESSAGE_BYTES)


def first_node_socket(host: str, port: int, secret: bytes) -> AsyncSocket:
    """Listens for the other nodes of an engine. An ``AllowedKeys`` must run already."""
    return _listening(f"--master_addr {host} --master_port {port}", (host, port), secret, MAX_NODE_MESSAGE_BYTES)


def node_socket(secret: bytes) -> AsyncSocket:
    """Connects once to the first node, which has the same key."""
    return _connecting(secret, zmq.curve_public(secret), MAX_NODE_MESSAGE_BYTES)


def _listening(flags: str, address: tuple[str, int], secret: bytes, max_bytes: int) -> AsyncSocket:
    socket = _socket(zmq.ROUTER, max_bytes)
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error
    socket.sndhwm = MAX_UNREAD
    try:
        socket.bind(net.numeric_tcp(*address))
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ServerError(f"{flags}: cannot listen there ({error.strerror}); choose another one") from error
    return socket


def _connecting(secret: bytes, server_key: bytes, max_bytes: int) -> AsyncSocket:
    socket = _socket(zmq.DEALER, max_bytes)
    socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
    socket.curve_serverkey = server_key
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.sndhwm = 0  # unlimited: the dispatcher limits the number of requests, and the router that of steps
    return socket


def _socket(kind: int, max_bytes: int) -> AsyncSocket:
    socket: AsyncSocket = zmq.asyncio.Context.instance().socket(kind)
    socket.ipv6 = True
    socket.rcvhwm = 0
    socket.maxmsgsize = max_bytes
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = ALIVE_MS, ALIVE_TIMEOUT_MS
    return socket


def try_send(socket: AsyncSocket, frames: list[bytes]) -> bool:
    """Never blocks. Returns whether the socket took the message. Sending past asyncio would lose events of reading."""
    sent: Any = socket.send_multipart(frames, flags=zmq.NOBLOCK)
    return sent.exception() is None


class AllowedKeys:
    """Answers ZMQ's question, whether a client with this public key may connect (ZAP, ZeroMQ RFC 27)."""

    def __init__(self, keys: frozenset[bytes], log: RateLimitedLog, source: str = ALLOWED_GATEWAYS) -> None:
        """``source``: the file of the keys."""
        self._keys = keys
        self._source = source
        self._log = log
        self._socket = zmq.asyncio.Context.instance().socket(zmq.REP)
        self._socket.bind(ZAP_ADDRESS)

    async def run(self) -> None:
        while True:
            await self._socket.send_multipart(self._reply(await self._socket.recv_multipart()))

    def close(self) -> None:
        self._socket.close(linger=0)

    def _reply(self, request: list[bytes]) -> list[bytes]:
        _, request_id, _, address, _, mechanism, *credentials = request
        is_allowed = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._keys
        if not is_allowed:
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else "none"
            self._log.warning(f"refused a connection from {address.decode()}: its key {key} is not in {self._source}")
        status = (b"200", b"OK") if is_allowed else (b"400", b"unknown key")
        return [ZAP_VERSION, request_id, *status, b"", b""]


class RateLimitedLog:
    """Warnings that somebody else can cause: one a minute."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_s = 0.0
        self._left_out = 0

    def warning(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} further ones since the last line)" if self._left_out else ""
        self._logger.warning("%s%s", text, more)
        self._next_s, self._left_out = now_s + LOG_INTERVAL_S, 0


async def log_failed_handshakes(
    socket: AsyncSocket,
    log: RateLimitedLog,
    reason: str = "it has not this engine's public key, or is no LightServe gateway",
) -> None:
    """Clients with a wrong key of this server, without a key, or that do not speak ZMQ. ``AllowedKeys`` logs others."""
    failures = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    ends = failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | ends)
    unfinished = 0  # handshakes
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())["event"]
        if event == zmq.EVENT_ACCEPTED:
            unfinished += 1
        elif event & ends:
            unfinished = max(unfinished - 1, 0)
        if event & failures or (event == zmq.EVENT_DISCONNECTED and unfinished):
            log.warning(f"refused a connection: {reason}")
            unfinished = max(unfinished - (event == zmq.EVENT_DISCONNECTED), 0)
