"""Has the model workers read and write KV tiers below host memory. A block counts only if all ranks have it."""

from __future__ import annotations

import asyncio

import msgspec

from lightserve.io_struct import LOWER_TIER_METHODS, KvFetch, KvFetched, KvFlush, KvFlushed, KvLookup
from lightserve.router.connection import RankConnections
from lightserve.router.rank_calls import RankCalls

_encode = msgspec.msgpack.Encoder().encode
_decode_found = msgspec.msgpack.Decoder(list[int]).decode
_decode_fetched = msgspec.msgpack.Decoder(KvFetched).decode
_decode_flushed = msgspec.msgpack.Decoder(KvFlushed).decode


class RpycLowerTierClient:
    def __init__(self, connections: RankConnections) -> None:
        lookups, fetches, flushes = (connections[method] for method in LOWER_TIER_METHODS)
        self._lookups: RankCalls[list[int] | None] = RankCalls(lookups, _join_found, None)
        self._fetches: RankCalls[KvFetched | None] = RankCalls(fetches, _join_fetched, None)
        self._flushes: RankCalls[KvFlushed | None] = RankCalls(flushes, _join_flushed, None)

    def lookup(self, command: KvLookup) -> asyncio.Future[list[int] | None]:
        return self._lookups.call(_encode(command))

    def fetch(self, command: KvFetch) -> asyncio.Future[KvFetched | None]:
        return self._fetches.call(_encode(command))

    def flush(self, command: KvFlush) -> asyncio.Future[KvFlushed | None]:
        return self._flushes.call(_encode(command))

    def close(self) -> None:
        for calls in (self._lookups, self._fetches, self._flushes):
            calls.close()


def _join_found(replies: list[bytes | None]) -> list[int]:
    """A block of which ranks find their parts in different tiers is read from the lowest of them."""
    found = [[] if reply is None else _decode_found(reply) for reply in replies]
    return [max(stores) for stores in zip(*found, strict=False)]


def _join_fetched(replies: list[bytes | None]) -> KvFetched:
    fetched = [_decode_fetched(reply) for reply in replies if reply is not None]
    if len(fetched) < len(replies):  # a rank raised an exception
        count = max((len(one.are_valid) for one in fetched), default=0)
        return KvFetched([False] * count)
    are_valid = [all(ranks) for ranks in zip(*(one.are_valid for one in fetched), strict=True)]
    return KvFetched(are_valid, max(one.seconds for one in fetched))


def _join_flushed(replies: list[bytes | None]) -> KvFlushed:
    flushed = [_decode_flushed(reply) for reply in replies if reply is not None]
    if len(flushed) < len(replies):  # a rank raised an exception
        return KvFlushed([], [], [])
    return KvFlushed(
        [min(numbers) for numbers in zip(*(one.written for one in flushed), strict=True)],
        [max(numbers) for numbers in zip(*(one.errors for one in flushed), strict=True)],
        [sum(numbers) for numbers in zip(*(one.used_bytes for one in flushed), strict=True)],
    )
