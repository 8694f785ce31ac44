"""Streams that can be resumed on one server without Redis: files of its run directory, which all HTTP processes read.

A stream is a file: a line with its owner and path, then its events. Whoever writes it holds a lock on it, so a reader
sees that it has ended, also if its process died.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightserve.errors import StreamNotFoundError
from lightserve.httpserver.http.sse import Connection, EventSource, Outs, RecordedGeneration, StreamRecorder
from lightserve.httpserver.resume.records import END_OF_EVENT, new_stream_id, parse_event_id, with_ids

MAX_STREAM_BYTES = 16 * 2**20  # 50,000 tokens; a longer stream cannot be resumed
MAX_BYTES = 256 * 2**20  # of all streams; new ones are not kept beyond
POLL_S = 0.05
CHECK_S = 0.25
_NAME = re.compile(r"stream-[\w-]{22}", re.ASCII)


class LocalStreams:
    def __init__(self, folder: Path, ttl_s: float) -> None:
        self.ttl_s = ttl_s  # how long a client can come back
        self._folder = folder
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}  # the times of files, and since when they are so

    def path_of(self, stream_id: bytes) -> Path:
        return self._folder / f"stream-{stream_id.decode()}"

    def stop(self, event_id: str, owner: str, path: str) -> None:
        """End a stream of this client. Raises if it has none."""
        file = _open(self, event_id, owner, path)
        os.close(file)
        self.path_of(parse_event_id(event_id)[0]).unlink(missing_ok=True)

    def has_room(self) -> bool:
        """Removes what expired first: what has not changed for so long, and nobody writes."""
        size, now_s = 0, time.monotonic()
        seen, self._seen = self._seen, {}
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process removed it
                    status = path.stat()
                    times = (status.st_mtime_ns, status.st_atime_ns)
                    state, since_s = seen.get(path.name, (times, now_s))
                    if state == times and now_s - since_s > self.ttl_s and not _is_written(path):
                        path.unlink()
                        continue
                    self._seen[path.name] = (times, since_s if state == times else now_s)
                    size += status.st_size
        return size < MAX_BYTES


class LocalRecorder(StreamRecorder):
    """Of one request; one that is no stream of events leaves it unused."""

    def __init__(self, streams: LocalStreams, owner: str, path: str) -> None:
        self.sent_outs: Outs = []
        self._streams = streams
        self._head = f"{owner} {path}\n".encode()
        self._id = new_stream_id()
        self._path = streams.path_of(self._id)
        self._file = -1  # -1: the stream is not kept
        self._number = 0  # of the last event
        self._size = 0

    def discard(self) -> None:
        """Nothing is kept before the stream begins."""

    def begin(self, generation: RecordedGeneration, keep_alive: bytes) -> None:
        if self._streams.has_room():
            self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write(self._head)

    def add(self, outs: Outs, events: bytes) -> bytes:
        if self._file < 0 or not events:
            return events
        events, self._number = with_ids(events, self._id, self._number)
        self._write(events)
        return events

    def end(self, events: bytes) -> bytes:
        return self.add([], events)

    def release(self) -> None:
        """No other server has its events."""

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # unlocks it too
            self._file = -1

    async def wait_for_reconnect(self, sending: asyncio.Future[Any]) -> None:
        """Readers change the access time of the file; a client that stops the stream removes it."""
        alone_since_s, read_ns = time.monotonic(), -1
        while self._file >= 0 and not sending.done():
            await asyncio.wait((sending,), timeout=CHECK_S)
            try:
                last_ns = self._path.stat().st_atime_ns
            except FileNotFoundError:
                return
            if last_ns != read_ns:
                alone_since_s, read_ns = time.monotonic(), last_ns
            if time.monotonic() - alone_since_s > self._streams.ttl_s:
                self._path.unlink(missing_ok=True)
                return

    def _write(self, data: bytes) -> None:
        self._size += len(data)
        try:
            if self._size > MAX_STREAM_BYTES:
                raise OSError("the stream is too long")
            os.write(self._file, data)
        except OSError:  # the disk is full: the stream goes on, and cannot be resumed
            self._path.unlink(missing_ok=True)
            self.close()


class LocalReplay(EventSource):
    """The events after the client's last one, also those that are still to come."""

    def __init__(self, streams: LocalStreams, event_id: str, owner: str, path: str, keep_alive: bytes) -> None:
        self.has_begun = False
        self.recorder = None
        self.keep_alive = keep_alive
        stream_id, number = parse_event_id(event_id)
        self._path = streams.path_of(stream_id)
        self._file = _open(streams, event_id, owner, path)
        self.generator = self._follow(number)

    def record(self, recorder: StreamRecorder | None) -> None:
        """It is recorded already."""

    def write_to(self, connection: Connection, on_written: Callable[[], None]) -> None:
        """The events come from a file."""

    async def __anext__(self) -> bytes:
        return await anext(self.generator)

    async def aclose(self) -> None:
        await self.generator.aclose()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def _follow(self, skipped: int) -> AsyncGenerator[bytes, None]:
        try:
            yield b""  # the response begins at once
            rest = b""
            while True:
                is_written = _is_written(self._path)  # asked before reading, so that nothing can come in between
                *events, rest = (rest + self._read()).split(END_OF_EVENT)
                new_events = events[skipped:]
                skipped -= len(events) - len(new_events)
                if new_events:
                    yield b"".join([event + END_OF_EVENT for event in new_events])
                elif not is_written:
                    return
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            self.close()

    def _read(self) -> bytes:
        with suppress(FileNotFoundError):
            os.utime(self._path, ns=(time.monotonic_ns(), self._path.stat().st_mtime_ns))
        return os.read(self._file, MAX_STREAM_BYTES)


def _open(streams: LocalStreams, event_id: str, owner: str, path: str) -> int:
    """The file of a stream, after its head. Raises if this client cannot get it."""
    stream_id, _ = parse_event_id(event_id)
    try:
        file = os.open(streams.path_of(stream_id), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StreamNotFoundError(event_id) from error
    head = f"{owner} {path}\n".encode()
    if not hmac.compare_digest(os.read(file, len(head)), head):
        os.close(file)
        raise StreamNotFoundError(event_id)
    return file


def _is_written(path: Path) -> bool:
    """Whether a process still writes it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
