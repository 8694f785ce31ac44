"""Waits for the KV that the model workers receive from prefill engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from lightserve.ipc.worker_calls import CANCEL_RECEIVE, RECEIVE_KV
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.workers.calls import RankCalls
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


class KvReceiverClient:
    """Every rank has a call open, which returns when it has ended a transfer. A transfer ends when all ranks have."""

    def __init__(self, calls: RankCalls, addresses: list[str]) -> None:
        """``addresses`` of the workers, by rank."""
        self.addresses = addresses
        self.on_received: Callable[[KvReceived], None] = lambda _: None
        self._calls = calls
        self._ended: dict[int, list[int]] = {}  # by transfer: blocks that have come, of each rank that has ended it

    def start(self) -> None:
        for rank in range(len(self.addresses)):
            self._wait(rank)

    def cancel(self, transfer_id: int) -> None:
        self._calls.call(CANCEL_RECEIVE, transfer_id)

    def _wait(self, rank: int) -> None:
        self._calls.call(RECEIVE_KV, None, ranks=[rank]).add_done_callback(partial(self._on_reply, rank))

    def _on_reply(self, rank: int, reply: asyncio.Future[list[KvReceived] | None]) -> None:
        if (error := reply.exception()) is not None:
            logger.error("no KV of other engines can be received: %s", error)
            return
        received = reply.result()
        if received is None:  # the workers are lost
            return
        self._wait(rank)
        for ended in received:
            counts = self._ended.setdefault(ended.transfer_id, [])
            counts.append(ended.num_blocks)
            if len(counts) == len(self.addresses):
                del self._ended[ended.transfer_id]
                self.on_received(KvReceived(ended.transfer_id, min(counts)))
