"""The stream log of an HTTP process: writes what its streams say to Redis, some milliseconds behind them.

Streams never wait for it. If Redis does not answer, they go on without it: their clients cannot come back for them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from lightserve.errors import UnavailableError
from lightserve.httpserver.resume.records import PROCESS_PREFIX, Keys, deletion, release
from lightserve.httpserver.resume.redis import Command, RedisConnection, RedisError, Reply
from lightserve.ipc.channel import Sender
from lightserve.messages.request import StreamLogCounts, ToRouter
from lightserve.utils.logger import init_logger
from lightserve.utils.net import parse_redis

logger = init_logger(__name__)

FLUSH_S = 0.02  # between two writes: the stream log is so much behind the clients, and a round trip
TIMEOUT_S = 1.0  # of a write: then Redis counts as down
RETRY_S = 5.0  # a Redis that is down is left alone for so long
RENEW_S = 1.0
LEASE_MS = 3000  # a process that has not renewed its key for so long counts as dead
MAX_PENDING_BYTES = 64 * 2**20  # that Redis has not got yet
MAX_UNSENT = 10_000  # streams
DOWN = "the stream log (--stream_log) cannot be reached; retry later"


class Written(Protocol):
    """A stream that the stream log writes."""

    keys: Keys

    def write(self) -> None:
        """Put the events that have come since the last time."""

    def renew(self) -> list[tuple[Command, Callable[[Reply], None] | None]]:
        """What to send every second while the stream runs."""

    def lose(self) -> None:
        """The stream log has given it up."""


@dataclass(slots=True)
class Counts:
    lost: int = 0  # streams that went on without the stream log
    resumed: int = 0  # clients that came back for a stream
    taken_over: int = 0  # streams of dead processes that this one continued


class StreamLog:
    def __init__(self, url: str, ttl_s: float) -> None:
        self.address = parse_redis(url)
        self.ttl_s = ttl_s
        self.token = secrets.token_hex(8).encode()  # of this process
        self.counts = Counts()
        self._open: dict[bytes, Written] = {}  # by the key of their events
        self._pending: list[tuple[Command, bytes, Callable[[Reply], None] | None]] = []
        self._pending_bytes = 0
        self._changed: dict[bytes, Written] = {}  # streams that have events to write, by the key of their events
        self._wake = asyncio.Event()
        self._down_until_s = float("-inf")
        self._is_down = False
        self._unsent: list[Command] = []  # about streams that were given up: no client may wait for their end

    @property
    def is_up(self) -> bool:
        """Whether a stream that begins now is written."""
        return time.monotonic() >= self._down_until_s

    def open(self, stream: Written) -> None:
        self._open[stream.keys.events] = stream

    def close(self, stream: Written) -> None:
        """Nothing more comes; what was put is written."""
        self._open.pop(stream.keys.events, None)

    def has_more(self, stream: Written) -> None:
        """Ask it soon what to write: the events of some steps are one entry."""
        self._changed[stream.keys.events] = stream
        self._wake.set()

    def put(self, stream: Written, command: Command, then: Callable[[Reply], None] | None = None) -> None:
        """Send it soon, in order."""
        self._pending.append((command, stream.keys.events, then))
        self._pending_bytes += sum([len(argument) for argument in command if isinstance(argument, bytes)])
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._lose_all(f"more than {MAX_PENDING_BYTES} bytes wait for it")
            return
        self._wake.set()

    def give_back(self, keys: Keys) -> None:
        """Another process may continue this stream, even if Redis does not answer now."""
        self._unsent.append(release(keys, self.token))
        self._wake.set()

    async def connect(self) -> RedisConnection:
        """A connection for one reader."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await RedisConnection.open(self.address)
        except (OSError, TimeoutError) as error:
            raise UnavailableError(DOWN) from error

    async def run(self) -> None:
        """Write until cancelled."""
        connection: RedisConnection | None = None
        renewed_s = float("-inf")
        while True:
            if not self.is_up:
                await asyncio.sleep(max(self._down_until_s - time.monotonic(), 0.0))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(renewed_s + RENEW_S - time.monotonic(), 0.0)):
                    await self._wake.wait()
            if time.monotonic() - renewed_s >= RENEW_S:
                self._renew()
                renewed_s = time.monotonic()
            connection = await self._flush(connection)
            await asyncio.sleep(FLUSH_S)

    def _renew(self) -> None:
        self._pending.append(((b"SET", PROCESS_PREFIX + self.token, 1, b"PX", LEASE_MS), b"", None))
        for stream in list(self._open.values()):
            for command, then in stream.renew():
                self.put(stream, command, then)

    async def _flush(self, connection: RedisConnection | None) -> RedisConnection | None:
        """Send what is pending. Returns the connection for the next time."""
        changed, self._changed = self._changed, {}
        for stream in changed.values():
            stream.write()
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        unsent, self._unsent = self._unsent, []
        self._wake.clear()
        pending[:0] = [(command, b"", None) for command in unsent]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connection = connection or await RedisConnection.open(self.address)
                replies = await connection.call(*[command for command, _, _ in pending])
        except (OSError, TimeoutError) as error:
            if connection is not None:
                connection.close()
            self._unsent = unsent + self._unsent
            self._lose_all(str(error) or f"it has not answered for {TIMEOUT_S:g} s")
            return None
        if self._is_down:
            self._is_down = False
            logger.info("the stream log %s answers again: new streams can be resumed", self.address.name)
        for (_, key, then), reply in zip(pending, replies, strict=True):
            self._handle(key, then, reply)
        return connection

    def _handle(self, key: bytes, then: Callable[[Reply], None] | None, reply: Reply) -> None:
        if isinstance(reply, RedisError):
            stream = self._open.pop(key, None)
            logger.warning("the stream log %s refuses a write: %s", self.address.name, reply)
            if stream is not None:
                self._lose(stream)
        elif then is not None:
            then(reply)

    def _lose_all(self, reason: str) -> None:
        streams, self._open = list(self._open.values()), {}
        self._pending, self._pending_bytes, self._changed = [], 0, {}
        self._down_until_s = time.monotonic() + RETRY_S
        if not self._is_down or streams:
            what = "the stream log %s is down or too slow (%s): %d streams go on without it, and cannot be resumed"
            logger.warning(what, self.address.name, reason, len(streams))
        self._is_down = True
        for stream in streams:
            self._unsent.append(deletion(stream.keys, self.token))
            self._lose(stream)
        del self._unsent[:-MAX_UNSENT]  # what is not deleted expires

    def _lose(self, stream: Written) -> None:
        self.counts.lost += 1
        stream.lose()


async def report_stream_log(stream_log: StreamLog, to_router: Sender[ToRouter]) -> None:
    """Every HTTP process has its own counts. The router adds them up, so that every process shows the same sum."""
    while True:
        await asyncio.sleep(RENEW_S)
        counts, stream_log.counts = stream_log.counts, Counts()
        if counts != Counts():
            to_router.send(StreamLogCounts(counts.lost, counts.resumed, counts.taken_over))
