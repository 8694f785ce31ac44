"""A stream that is written to the stream log while it runs."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lightserve.httpserver.http.sse import RecordedGeneration
from lightserve.httpserver.resume.records import (
    Head,
    Keys,
    Outs,
    deletion,
    encode_head,
    encode_outs,
    new_stream_id,
    release,
    with_ids,
)
from lightserve.httpserver.resume.redis import Command, Reply
from lightserve.httpserver.resume.stream_log import StreamLog
from lightserve.utils.clock import unix_s

CHECK_S = 0.25


class LoggedStream(ABC):
    """The StreamRecorder of one request; one that is no stream leaves it unused."""

    def __init__(self, stream_log: StreamLog, stream_id: bytes) -> None:
        self.keys = Keys.of(stream_id)
        self.sent_outs: Outs = []
        self._id = stream_id
        self._stream_log = stream_log
        self._number = 0  # of the last event
        self._unwritten: Outs = []  # tokens that the stream log has not got
        self._events: list[bytes] = []  # of these
        self._is_written = False  # the stream log has its head
        self._is_lost = False
        self._has_ended = False
        self._alone_since_s: float | None = None  # the client has disconnected, and nobody else reads the stream
        self._renewed_s = 0.0

    def discard(self) -> None:
        self.lose()

    @abstractmethod
    def begin(self, generation: RecordedGeneration, keep_alive: bytes) -> None: ...

    @abstractmethod
    def _write_head(self) -> None:
        """Before the first event, unless the stream is written already."""

    def add(self, outs: Outs, events: bytes) -> bytes:
        if self._is_lost:
            return events
        self._unwritten += outs
        if not events:
            return events
        if not self._is_written:
            self._write_head()
        events, self._number = with_ids(events, self._id, self._number)
        self._events.append(events)
        self._stream_log.has_more(self)
        return events

    def end(self, events: bytes) -> bytes:
        events = self.add([], events)
        if self._is_written and not self._is_lost:
            self._has_ended = True
            self.write()
            self._expire()
            marker = (b"XADD", self.keys.events, b"%d-1" % self._number, b"outs", encode_outs(self._unwritten))
            self._stream_log.put(self, marker, lambda _: self._stream_log.close(self))
        return events

    def release(self) -> None:
        if self._is_written and not self._is_lost:
            self.write()
            self._put(*release(self.keys, self._stream_log.token))
        self._is_lost = True

    def close(self) -> None:
        if not self._has_ended:
            self._stream_log.close(self)

    async def wait_for_reconnect(self, sending: asyncio.Future[Any]) -> None:
        """The client has disconnected. Wait for the end of the stream, or until no client has come back for it."""
        self._alone_since_s = time.monotonic()
        while not sending.done() and self._is_written and not self._is_lost:
            await asyncio.wait((sending,), timeout=CHECK_S)
            if time.monotonic() - self._alone_since_s > self._stream_log.ttl_s:
                break
        if not sending.done() and self._is_written and not self._is_lost:
            self._put(*deletion(self.keys, self._stream_log.token))
            self._is_lost = True

    # for the stream log

    def write(self) -> None:
        if not self._events:
            return
        entry = (b"outs", encode_outs(self._unwritten), b"events", b"".join(self._events))
        self._put(b"XADD", self.keys.events, b"%d-0" % self._number, *entry)
        self._unwritten, self._events = [], []
        if self._renewed_s == 0.0:  # a key has no expiry before it exists
            self._expire()

    def renew(self) -> list[tuple[Command, Callable[[Reply], None] | None]]:
        commands: list[tuple[Command, Callable[[Reply], None] | None]] = []
        if time.monotonic() - self._renewed_s > self._stream_log.ttl_s / 4:
            self._expire()
        if self._alone_since_s is not None:
            commands.append(((b"EXISTS", self.keys.reader), self._check_reader))
        return commands

    def lose(self) -> None:
        self._is_lost = True
        self._unwritten, self._events = [], []

    def _check_reader(self, reply: Reply) -> None:
        if reply:
            self._alone_since_s = time.monotonic()

    def _expire(self) -> None:
        """A client can come back for ``ttl_s`` after the death of this process, or the end of the stream."""
        self._renewed_s = time.monotonic()
        for key in (self.keys.head, self.keys.events):
            self._put(b"PEXPIRE", key, int(self._stream_log.ttl_s * 1250))  # it is renewed every quarter of ttl_s

    def _put(self, *command: bytes | int) -> None:
        self._stream_log.put(self, command)


class NewStream(LoggedStream):
    """Of a stream that begins here."""

    def __init__(self, stream_log: StreamLog, owner: str, path: str, state: Mapping[str, Any], body: list[bytes]):
        """``state`` is that of the request. It has its ids when the stream begins, and ``body`` is complete then."""
        super().__init__(stream_log, new_stream_id())
        self._owner = owner
        self._path = path
        self._state = state
        self._body = body
        self._head = b""

    def begin(self, generation: RecordedGeneration, keep_alive: bytes) -> None:
        if not self._stream_log.is_up:
            self.lose()
            self._stream_log.counts.lost += 1
            return
        seeds, started_s = generation.fix_seeds(), unix_s(time.monotonic())
        request_id, response_id = self._state["request_id"], self._state.get("response_id", "")
        head = Head(self._owner, self._path, request_id, seeds, started_s, keep_alive, response_id)
        self._head = encode_head(head)

    def _write_head(self) -> None:
        self._is_written = True
        self._stream_log.open(self)
        known = (b"head", self._head, b"body", b"".join(self._body), b"process", self._stream_log.token)
        self._put(b"HSET", self.keys.head, *known)
        self._head = b""
        self._body.clear()

    def lose(self) -> None:
        super().lose()
        self._body.clear()


class ResumedStream(LoggedStream):
    """Of a stream whose process has died: it goes on after the tokens ``sent_outs`` and the event with this number."""

    def __init__(self, stream_log: StreamLog, stream_id: bytes, head: Head, sent_outs: Outs, number: int) -> None:
        super().__init__(stream_log, stream_id)
        self.sent_outs = sent_outs
        self._taken = head
        self._number = number

    def begin(self, generation: RecordedGeneration, keep_alive: bytes) -> None:
        generation.fix_seeds(self._taken.seeds)
        age_s = unix_s(time.monotonic()) - self._taken.started_s  # by the clocks of two machines
        generation.continue_after(self.sent_outs, max(age_s, 0.0))
        self._is_written = True
        self._stream_log.open(self)
        self._expire()

    def _write_head(self) -> None:
        raise RuntimeError("the stream log has the head of a stream that is taken over")

    def stop(self, is_final: bool) -> None:
        """It could not go on here; another process may try it, unless ``is_final``."""
        if is_final:
            self._put(*deletion(self.keys, self._stream_log.token))
        else:
            self._put(*release(self.keys, self._stream_log.token))
