"""Waits for the KV that the model workers receive from prefill engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from lightserve.io_struct import KV_INBOX_METHODS, KvReceived
from lightserve.router.connection import RankConnections
from lightserve.router.rank_calls import RankCalls

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[KvReceived]).decode


class KvInboxClient:
    """Every rank has a call open, which returns when it has ended a ticket. A ticket ends when all ranks have."""

    def __init__(self, connections: RankConnections, addresses: list[str]) -> None:
        self.addresses = addresses
        self.on_received: Callable[[KvReceived], None] = lambda _: None
        received, cancels = (connections[method] for method in KV_INBOX_METHODS)
        self._ranks: list[RankCalls[list[KvReceived] | None]] = [RankCalls([rank], _first, None) for rank in received]
        self._cancels: RankCalls[None] = RankCalls(cancels, lambda _: None, None)
        self._ended: dict[int, list[int]] = {}  # by ticket: blocks that have come, of each rank that has ended it

    def start(self) -> None:
        for rank in self._ranks:
            self._wait(rank)

    def cancel(self, ticket: int) -> None:
        self._cancels.call(_encode(ticket))

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._cancels.close()

    def _wait(self, rank: RankCalls[list[KvReceived] | None]) -> None:
        rank.call(b"").add_done_callback(partial(self._on_reply, rank))

    def _on_reply(
        self, rank: RankCalls[list[KvReceived] | None], reply: asyncio.Future[list[KvReceived] | None]
    ) -> None:
        received = reply.result()
        if received is None:  # the workers are lost
            return
        self._wait(rank)
        for one in received:
            counts = self._ended.setdefault(one.ticket, [])
            counts.append(one.num_blocks)
            if len(counts) == len(self._ranks):
                del self._ended[one.ticket]
                self.on_received(KvReceived(one.ticket, min(counts)))


def _first(replies: list[bytes | None]) -> list[KvReceived] | None:
    return None if replies[0] is None else _decode(replies[0])
