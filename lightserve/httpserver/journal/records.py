"""What the journal holds of a stream, and under which keys.

lightserve:stream:ID            a Redis stream. The entry n-0 has some events, n is the last one; n-1 is the end marker
lightserve:stream:ID:head       a hash: who may resume the stream, and what another process needs to continue it
lightserve:stream:ID:reader     exists while a client that came back reads the stream
lightserve:stream:ID:taken      exists while a process starts the request again
lightserve:http:TOKEN           exists while the HTTP process with this token runs
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

import msgspec

from lightserve.errors import StreamNotFoundError
from lightserve.httpserver.journal.resp import Command
from lightserve.io_struct import StrOut

PREFIX = b"lightserve:stream:"
PROCESS_PREFIX = b"lightserve:http:"
END_OF_EVENT = b"\n\n"
_EVENT_ID = re.compile(r"([\w-]{22})\.(\d{1,9})", re.ASCII)

# Redis runs it as one step
DELETE_OWN = b"if redis.call('HGET', KEYS[1], 'process') == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end"

Outs = list[tuple[int, StrOut]]
_decode_outs = msgspec.msgpack.Decoder(Outs).decode
encode_outs = msgspec.msgpack.Encoder().encode


def new_stream_id() -> bytes:
    """128 random bits: nobody can guess it."""
    return secrets.token_urlsafe(16).encode()


def parse_event_id(text: str) -> tuple[bytes, int]:
    """The stream and the number of ``Last-Event-ID``."""
    found = _EVENT_ID.fullmatch(text.strip())
    if found is None:
        raise StreamNotFoundError(text)
    return found[1].encode(), int(found[2])


def owner_hash(digests: list[bytes]) -> str:
    """Of the API keys of a request, as the journal stores it. Requests without a key have one too, the same."""
    return hashlib.sha256(b"journal" + b"".join(digests)).hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    events: bytes
    head: bytes
    reader: bytes
    taken: bytes

    @staticmethod
    def of(stream_id: bytes) -> Keys:
        base = PREFIX + stream_id
        return Keys(base, base + b":head", base + b":reader", base + b":taken")


def deletion(keys: Keys, process: bytes) -> Command:
    """Delete a stream if it still belongs to this process: another one may have taken it over."""
    return (b"EVAL", DELETE_OWN, 2, keys.head, keys.events, process)


class Head(msgspec.Struct, frozen=True):
    """All that is known when the stream begins."""

    owner: str  # owner_hash of the client
    path: str  # of the route
    request_id: str
    body: bytes  # of the request
    seeds: list[int]  # of its sequences
    started_s: float  # since 1970
    keep_alive: bytes


encode_head = msgspec.msgpack.Encoder().encode
decode_head = msgspec.msgpack.Decoder(Head).decode


@dataclass(frozen=True, slots=True)
class Entry:
    last: int  # the number of its last event
    events: bytes  # with ids
    outs: Outs  # the tokens that they were written from
    is_end: bool

    @staticmethod
    def of(reply: list[object]) -> Entry:
        entry_id, values = reply
        if not isinstance(entry_id, bytes) or not isinstance(values, list):
            raise ConnectionError("the reply is no entry of a Redis stream")
        number, _, sub = entry_id.partition(b"-")
        fields = dict(zip(values[::2], values[1::2], strict=True))
        return Entry(int(number), fields.get(b"events", b""), _decode_outs(fields[b"outs"]), sub != b"0")

    def after(self, number: int) -> bytes:
        """The events with a higher number."""
        if self.last <= number:
            return b""
        events = self.events.split(END_OF_EVENT)[:-1]
        return b"".join([event + END_OF_EVENT for event in events[max(len(events) - (self.last - number), 0) :]])


def with_ids(events: bytes, stream_id: bytes, number: int) -> tuple[bytes, int]:
    """``events`` with ids that follow ``number``, and the last number. Ids come last: clients look at the begin."""
    found = []
    for event in events.split(END_OF_EVENT)[:-1]:
        number += 1
        found.append(b"%b\nid: %b.%d\n\n" % (event, stream_id, number))
    return b"".join(found), number
