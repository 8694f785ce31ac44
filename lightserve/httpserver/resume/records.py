"""What the stream log holds of a stream, and under which keys.

lightserve:stream:ID            a Redis stream. The entry n-0 has some events, n is the last one; n-1 is the end marker
lightserve:stream:ID:head       a hash: head, see Head; body, that of the request; process, the token of who runs it
lightserve:stream:ID:reader     exists while a client that came back reads the stream
lightserve:http:TOKEN           exists while the HTTP process with this token runs
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

import msgspec

from lightserve.errors import StreamNotFoundError
from lightserve.httpserver.resume.redis import Command
from lightserve.messages.output import StrOut

PREFIX = b"lightserve:stream:"
PROCESS_PREFIX = b"lightserve:http:"
END_OF_EVENT = b"\n\n"
_EVENT_ID = re.compile(r"([\w-]{22})\.(\d{1,9})", re.ASCII)

# Redis runs each of them as one step
_DELETE = b"if redis.call('HGET', KEYS[1], 'process') == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end"
_RELEASE = b"if redis.call('HGET', KEYS[1], 'process') == ARGV[1] then redis.call('HSET', KEYS[1], 'process', '') end"
_TAKE = b"""
if redis.call('HGET', KEYS[1], 'process') ~= ARGV[1] or redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if (last and last[1] or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'process', ARGV[3])
return 1
"""

Outs = list[tuple[int, StrOut]]
_decode_outs = msgspec.msgpack.Decoder(Outs).decode
encode_outs = msgspec.msgpack.Encoder().encode


def new_stream_id() -> bytes:
    """128 random bits: nobody can guess it."""
    return secrets.token_urlsafe(16).encode()


def parse_event_id(text: str) -> tuple[bytes, int]:
    """The stream and the number of ``Last-Event-ID``."""
    match = _EVENT_ID.fullmatch(text.strip())
    if match is None:
        raise StreamNotFoundError(text)
    return match[1].encode(), int(match[2])


def owner_hash(digests: list[bytes]) -> str:
    """Of the API keys of a request, as the stream log stores it. Requests without a key have one too, the same."""
    return hashlib.sha256(b"journal" + b"".join(digests)).hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    events: bytes
    head: bytes
    reader: bytes

    @staticmethod
    def of(stream_id: bytes) -> Keys:
        base = PREFIX + stream_id
        return Keys(base, base + b":head", base + b":reader")


def deletion(keys: Keys, process: bytes) -> Command:
    """Delete a stream if it still belongs to this process: another one may have taken it over."""
    return (b"EVAL", _DELETE, 2, keys.head, keys.events, process)


def release(keys: Keys, process: bytes) -> Command:
    """Let another process continue a stream that belongs to this one."""
    return (b"EVAL", _RELEASE, 1, keys.head, process)


def takeover(keys: Keys, last_entry: bytes, dead: bytes, process: bytes) -> Command:
    """A stream belongs to ``process`` from now on: replies 1, unless ``dead`` lives or others were faster, then 0.

    ``last_entry`` is the id of the last one that was read; empty: there is none.
    """
    return (b"EVAL", _TAKE, 3, keys.head, keys.events, PROCESS_PREFIX + dead, dead, last_entry, process)


class Head(msgspec.Struct, frozen=True):
    """All that is known when the stream begins, besides the body of the request."""

    owner: str  # owner_hash of the client
    path: str  # of the route
    request_id: str
    seeds: list[int]  # of its sequences
    started_s: float  # since 1970
    keep_alive: bytes
    response_id: str = ""  # of /v1/responses


encode_head = msgspec.msgpack.Encoder().encode
decode_head = msgspec.msgpack.Decoder(Head).decode


@dataclass(frozen=True, slots=True)
class Entry:
    id: bytes
    last: int  # the number of its last event
    events: bytes  # with ids
    encoded_outs: bytes
    is_end: bool

    @staticmethod
    def of(reply: list[object]) -> Entry:
        entry_id, values = reply
        if not isinstance(entry_id, bytes) or not isinstance(values, list):
            raise ConnectionError("the reply is no entry of a Redis stream")
        number, _, sub = entry_id.partition(b"-")
        fields = dict(zip(values[::2], values[1::2], strict=True))
        return Entry(entry_id, int(number), fields.get(b"events", b""), fields[b"outs"], sub != b"0")

    @property
    def outs(self) -> Outs:
        """The tokens that the events were written from."""
        return _decode_outs(self.encoded_outs)

    def after(self, number: int) -> bytes:
        """The events with a higher number."""
        if self.last <= number:
            return b""
        events = self.events.split(END_OF_EVENT)[:-1]
        return b"".join([event + END_OF_EVENT for event in events[max(len(events) - (self.last - number), 0) :]])


def with_ids(events: bytes, stream_id: bytes, number: int) -> tuple[bytes, int]:
    """``events`` with ids that follow ``number``, and the last number. Ids come last: clients look at the begin."""
    numbered_events = []
    for event in events.split(END_OF_EVENT)[:-1]:
        number += 1
        numbered_events.append(b"%b\nid: %b.%d\n\n" % (event, stream_id, number))
    return b"".join(numbered_events), number
