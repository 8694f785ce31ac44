"""A client that came back: the events after its last one, from the journal, while the stream goes on somewhere."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lightserve.errors import StreamGoneError, StreamNotFoundError, UnavailableError
from lightserve.httpserver.journal.journal import DOWN, LEASE_MS, TIMEOUT_S, Journal
from lightserve.httpserver.journal.recording import TakenOverRecording
from lightserve.httpserver.journal.records import PROCESS_PREFIX, Entry, Head, Keys, decode_head, parse_event_id
from lightserve.httpserver.journal.redis_connection import RedisConnection
from lightserve.httpserver.journal.resp import Command, RedisError, Reply
from lightserve.httpserver.wire.sse import StreamRecorder

BLOCK_MS = 500  # how long Redis waits for the next entry
MAX_ENTRIES = 256  # of one answer
TAKE_MS = 10_000  # how long others wait for a process that starts the request again

StartAgain = Callable[[Head, TakenOverRecording], None]


class Follower:
    """An EventSource."""

    @classmethod
    async def connect(cls, journal: Journal, event_id: str, start_again: StartAgain) -> Follower:
        parse_event_id(event_id)  # what is none needs no connection
        return cls(journal, event_id, await journal.connect(), start_again)

    def __init__(self, journal: Journal, event_id: str, connection: RedisConnection, start_again: StartAgain) -> None:
        self.has_begun = False
        self.recorder: StreamRecorder | None = None
        self.keep_alive = b""
        self._journal = journal
        self._event_id = event_id
        self._id, self._number = parse_event_id(event_id)
        self._keys = Keys.of(self._id)
        self._connection = connection
        self._start_again = start_again
        self._entry = b"%d-0" % self._number  # the last one that was read
        self.generator = self._follow()

    async def open(self, owner: str, path: str) -> None:
        """Raises if this client cannot get the stream."""
        head, process = await self._read_head()
        if head is None or head.path != path or not hmac.compare_digest(head.owner, owner):
            raise StreamNotFoundError(self._event_id)
        self.keep_alive = head.keep_alive
        if len(head.seeds) > 1 and not await self._is_alive(process) and not await self._has_ended():
            raise StreamGoneError(
                "the server of this stream died; a stream with several choices cannot go on in another one: "
                "send the request again, without Last-Event-ID"
            )

    def record(self, recorder: StreamRecorder | None) -> None:
        """It is recorded already."""

    def close(self) -> None:
        self._connection.close()

    async def __anext__(self) -> bytes:
        return await anext(self.generator)

    async def aclose(self) -> None:
        await self.generator.aclose()

    async def _follow(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b""  # the response begins at once
            while True:
                entries = await self._next_entries()
                for entry in entries:
                    events = entry.after(self._number)
                    if events:
                        yield events
                    if entry.is_end:
                        return
                if not entries:
                    await self._check_process()
        finally:
            self._connection.close()

    async def _next_entries(self) -> list[Entry]:
        """Those that have come; after a while none. Tells the stream's process that somebody reads."""
        reading = (b"SET", self._keys.reader, 1, b"PX", LEASE_MS)
        options = (b"COUNT", MAX_ENTRIES, b"BLOCK", BLOCK_MS)
        _, found = await self._call(reading, (b"XREAD", *options, b"STREAMS", self._keys.events, self._entry))
        if found is None:
            return []
        entries = [Entry.of(one) for one in found[0][1]]
        self._entry = found[0][1][-1][0]
        return entries

    async def _check_process(self) -> None:
        """Continue the stream here if its process is dead."""
        head, process = await self._read_head()
        if head is None:
            raise UnavailableError("the journal has lost this stream, or it was given up")
        if await self._is_alive(process):
            return
        if len(head.seeds) > 1:
            raise UnavailableError("the server of this stream died")
        if not await self._take(process):
            return
        (found,) = await self._call((b"XRANGE", self._keys.events, b"-", b"+"))
        entries = [Entry.of(one) for one in found]
        if entries and not entries[-1].is_end:
            self._journal.counts.taken_over += 1
            self._start_again(head, TakenOverRecording(self._journal, self._id, head, entries))

    async def _take(self, process: bytes) -> bool:
        """Whether this process is the one that continues the stream. Another client may have come back elsewhere."""
        (is_first,) = await self._call((b"SET", self._keys.taken, 1, b"NX", b"PX", TAKE_MS))
        if is_first is None:
            return False
        (now,) = await self._call((b"HGET", self._keys.head, b"process"))
        if now != process:  # another one took it meanwhile
            return False
        await self._call((b"HSET", self._keys.head, b"process", self._journal.token))
        return True

    async def _read_head(self) -> tuple[Head | None, bytes]:
        (found,) = await self._call((b"HMGET", self._keys.head, b"head", b"process"))
        return (None, b"") if found[0] is None else (decode_head(found[0]), found[1])

    async def _is_alive(self, process: bytes) -> bool:
        (found,) = await self._call((b"EXISTS", PROCESS_PREFIX + process))
        return bool(found)

    async def _has_ended(self) -> bool:
        (found,) = await self._call((b"XREVRANGE", self._keys.events, b"+", b"-", b"COUNT", 1))
        return bool(found) and Entry.of(found[0]).is_end

    async def _call(self, *commands: Command) -> list[Any]:
        try:
            async with asyncio.timeout(TIMEOUT_S + BLOCK_MS / 1000):
                replies: list[Reply] = await self._connection.call(*commands)
        except (OSError, TimeoutError) as error:
            raise UnavailableError(DOWN) from error
        for reply in replies:
            if isinstance(reply, RedisError):
                raise UnavailableError(DOWN) from reply
        return replies
