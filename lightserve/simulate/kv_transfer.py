"""KV that simulated prefill servers compute for decode servers: transfers, and blocks on their way."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import RemotePrefillRequest
from lightserve.messages.step import KvRecv, KvSend

NETWORK_BYTES_PER_S = 12.5e9  # of a card, in and out: 100 Gbit/s
END = 0  # blocks of an event that ends a transfer


@dataclass(frozen=True, slots=True)
class Split:
    """Roles of the servers, and the network between them. Every card sends its part of the KV to one of the others."""

    roles: tuple[str, ...]
    min_tokens: int = 256  # --min_remote_prefill_tokens
    bytes_per_s: float = NETWORK_BYTES_PER_S
    latency_s: float = 1e-3  # from the end of a step to the first byte


@dataclass(slots=True, eq=False)
class Transfer:
    req_id: int
    decode: int  # server
    prefill: int  # server; the same: nobody computes the prompt
    num_blocks: int
    arrived: int = 0


class Links:
    """A server sends one thing after the other, and receives one after the other."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._sent_s: dict[int, float] = {}  # by server: when all that it sends has left
        self._received_s: dict[int, float] = {}

    def send(self, source: int, target: int, num_bytes: float, now: float) -> float:
        """Returns when all of it has arrived."""
        begin_s = max(now + self._latency_s, self._sent_s.get(source, 0.0), self._received_s.get(target, 0.0))
        end_s = begin_s + num_bytes / self._bytes_per_s
        self._sent_s[source] = self._received_s[target] = end_s
        return end_s


class KvTransfers:
    def __init__(self, split: Split, token_bytes: int) -> None:
        """``token_bytes``: of the KV of a token, in one card."""
        self._links = Links(split.bytes_per_s, split.latency_s)
        self._token_bytes = token_bytes
        self._transfers: dict[int, Transfer] = {}
        self._events: list[tuple[float, int, int, int]] = []  # a heap: time, order, transfer, blocks that arrive
        self._order = itertools.count()
        self.num_sent = 0  # tokens

    @property
    def next_s(self) -> float:
        while self._events and self._events[0][2] not in self._transfers:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def open(self, wanted: RemotePrefillRequest, decode: int, prefill: int) -> None:
        """A prefill server gets the prompt, or the decode server computes it itself."""
        self._transfers[wanted.transfer_id] = Transfer(wanted.req_id, decode, prefill, wanted.num_blocks)

    def expect(self, recvs: Iterable[KvRecv], now: float) -> None:
        """A step of a decode server has told its workers to wait so long."""
        for recv in recvs:
            self._add(now + recv.timeout_s, recv.transfer_id, END)

    def end(self, transfer_id: int, now: float) -> None:
        """With what has come until now."""
        self._add(now, transfer_id, END)

    def send(self, sends: Iterable[KvSend], source: int, now: float) -> None:
        """A step has ended that computed these blocks."""
        for send in sends:
            transfer = self._transfers.get(send.transfer_id)
            if transfer is None:
                continue
            tokens = len(send.slots)
            self.num_sent += tokens
            arrives_s = self._links.send(source, transfer.decode, tokens * self._token_bytes, now)
            self._add(arrives_s, send.transfer_id, tokens // BLOCK_TOKENS)

    def arrived(self, now: float) -> list[tuple[int, Transfer]]:
        """The transfers that have ended until now."""
        ended = []
        while self.next_s <= now:
            _, _, number, blocks = heapq.heappop(self._events)
            transfer = self._transfers[number]
            transfer.arrived += blocks
            if not blocks or transfer.arrived == transfer.num_blocks:
                ended.append((number, self._transfers.pop(number)))
        return ended

    def lose(self, server: int) -> list[tuple[int, Transfer]]:
        """A server died: the transfers that it waited for are void. Returns those whose prompts it computed."""
        self._transfers = {
            number: transfer for number, transfer in self._transfers.items() if transfer.decode != server
        }
        return [(number, transfer) for number, transfer in self._transfers.items() if transfer.prefill == server]

    def _add(self, at_s: float, transfer_id: int, blocks: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), transfer_id, blocks))
