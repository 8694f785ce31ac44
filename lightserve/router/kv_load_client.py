"""Waits for the model workers to load KV from a lower tier."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from lightserve.io_struct import KvLoaded
from lightserve.router.connection import RankConnection
from lightserve.router.rank_calls import RankCalls

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KvLoaded).decode


class KvLoadClient:
    def __init__(self, ranks: Sequence[RankConnection]) -> None:
        self._calls: RankCalls[KvLoaded | None] = RankCalls(ranks, _slowest, None)

    def wait(self, load_id: int) -> asyncio.Future[KvLoaded | None]:
        """Resolves when all ranks have ended the load; None: the workers are lost."""
        return self._calls.call(_encode(load_id))

    def close(self) -> None:
        self._calls.close()


def _slowest(replies: Iterable[bytes | None]) -> KvLoaded:
    """The load is as slow as the slowest rank, and valid if all ranks say so."""
    loaded = [KvLoaded(0.0, is_valid=False) if reply is None else _decode(reply) for reply in replies]
    return KvLoaded(max(one.seconds for one in loaded), all(one.is_valid for one in loaded))
