"""A client that came back: the events after its last one, from the stream log, while the stream goes on somewhere."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lightserve.errors import StreamGoneError, StreamNotFoundError, UnavailableError
from lightserve.httpserver.http.sse import Connection, StreamRecorder
from lightserve.httpserver.resume.logged_stream import ResumedStream
from lightserve.httpserver.resume.records import (
    PROCESS_PREFIX,
    Entry,
    Head,
    Keys,
    Outs,
    decode_head,
    parse_event_id,
    takeover,
)
from lightserve.httpserver.resume.redis import Command, RedisConnection, RedisError, Reply
from lightserve.httpserver.resume.stream_log import DOWN, LEASE_MS, TIMEOUT_S, StreamLog

BLOCK_MS = 500  # how long Redis waits for the next entry
MAX_ENTRIES = 256  # of one answer
FIRST_ENTRY = b"0-0"  # no entry has this id: all follow it
LOST = "the stream log has lost this stream, or it was given up"
AHEAD = (
    "the server of this stream died, and the stream log does not have all events that were sent; several choices or "
    "prompts would go on in another order: send the request again, without Last-Event-ID"
)

# runs the request with this head and body again; its result is the status
StartAgain = Callable[[Head, bytes, ResumedStream], asyncio.Future[int]]


class Replay:
    """An EventSource."""

    @classmethod
    async def connect(cls, stream_log: StreamLog, event_id: str, start_again: StartAgain) -> Replay:
        parse_event_id(event_id)  # what is none needs no connection
        return cls(stream_log, event_id, await stream_log.connect(), start_again)

    def __init__(
        self, stream_log: StreamLog, event_id: str, connection: RedisConnection, start_again: StartAgain
    ) -> None:
        self.has_begun = False
        self.recorder: StreamRecorder | None = None
        self.keep_alive = b""
        self._stream_log = stream_log
        self._event_id = event_id
        self._id, self._number = parse_event_id(event_id)
        self._keys = Keys.of(self._id)
        self._process = b""  # that has the stream, as the stream log said last
        self._connection = connection
        self._start_again = start_again
        self._continued: asyncio.Future[int] | None = None  # the request, if it goes on here
        self._entry = b"%d-0" % self._number  # the last one that was read
        self.generator = self._follow()

    async def open(self, owner: str, path: str) -> None:
        """Raises if this client cannot get the stream."""
        (fields,) = await self._call((b"HMGET", self._keys.head, b"head", b"process"))
        head = None if fields[0] is None else decode_head(fields[0])
        if head is None or head.path != path or not hmac.compare_digest(head.owner, owner):
            raise StreamNotFoundError(self._event_id)
        self.keep_alive, self._process = head.keep_alive, fields[1]
        if len(head.seeds) > 1 and not await self._is_alive():
            self._check_position(head, await self._last_entry())

    def record(self, recorder: StreamRecorder | None) -> None:
        """It is recorded already."""

    def close(self) -> None:
        self._connection.close()

    def write_to(self, connection: Connection, on_written: Callable[[], None]) -> None:
        """The events come from the log."""

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
        _, reply = await self._call(reading, self._read_after(self._entry, b"BLOCK", BLOCK_MS))
        entries = _entries(reply)
        if entries:
            self._entry = entries[-1].id
        return entries

    async def _check_process(self) -> None:
        """Continue the stream here if its process is dead."""
        if self._continued is not None and self._continued.done() and self._continued.result() != 200:
            problem = f"this server cannot go on with the stream: status {self._continued.result()}"
            raise UnavailableError(f"{problem}; come back to another one")
        known = self._process
        process, is_alive = await self._call(
            (b"HGET", self._keys.head, b"process"), (b"EXISTS", PROCESS_PREFIX + known)
        )
        if process is None:
            raise UnavailableError(LOST)
        self._process = process
        if process == known and not is_alive:
            await self._take_over()

    async def _take_over(self) -> None:
        """Read first: a stream that belongs to this process must run here."""
        sent_outs, last = await self._read_all()
        if last is not None and last.is_end:
            return
        ((encoded_head, body),) = await self._call((b"HMGET", self._keys.head, b"head", b"body"))
        if encoded_head is None or body is None:
            raise UnavailableError(LOST)
        head = decode_head(encoded_head)
        self._check_position(head, last)
        if not await self._take(b"" if last is None else last.id):
            return
        self._stream_log.counts.taken_over += 1
        logged = ResumedStream(self._stream_log, self._id, head, sent_outs, 0 if last is None else last.last)
        self._continued = self._start_again(head, body, logged)

    def _check_position(self, head: Head, last: Entry | None) -> None:
        """The stream log is some milliseconds behind the clients of a process. If that dies, another one writes the
        events that the stream log lacks once more: those of one sequence with the same numbers, those of several in any
        order."""
        number = 0 if last is None else last.last
        if len(head.seeds) > 1 and self._number > number:
            raise StreamGoneError(AHEAD)

    async def _last_entry(self) -> Entry | None:
        (reply,) = await self._call((b"XREVRANGE", self._keys.events, b"+", b"-", b"COUNT", 1))
        return Entry.of(reply[0]) if reply else None

    async def _is_alive(self) -> bool:
        (count,) = await self._call((b"EXISTS", PROCESS_PREFIX + self._process))
        return bool(count)

    async def _read_all(self) -> tuple[Outs, Entry | None]:
        """All tokens of the stream, and its last entry."""
        sent_outs: Outs = []
        last: Entry | None = None
        while True:
            (reply,) = await self._call(self._read_after(FIRST_ENTRY if last is None else last.id))
            entries = _entries(reply)
            if not entries:
                return sent_outs, last
            sent_outs += [out for entry in entries for out in entry.outs]
            last = entries[-1]

    async def _take(self, last_entry: bytes) -> bool:
        """Whether this process is the one that continues the stream. Another client may have come back elsewhere."""
        try:
            (is_ours,) = await self._call(takeover(self._keys, last_entry, self._process, self._stream_log.token))
        except BaseException:  # Redis may have done it all the same
            self._stream_log.give_back(self._keys)
            raise
        return bool(is_ours)

    def _read_after(self, entry_id: bytes, *options: bytes | int) -> Command:
        return (b"XREAD", b"COUNT", MAX_ENTRIES, *options, b"STREAMS", self._keys.events, entry_id)

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


def _entries(reply: Reply) -> list[Entry]:
    """Of the one stream that XREAD was asked for; None: it has none."""
    return [] if reply is None else [Entry.of(raw_entry) for raw_entry in reply[0][1]]
