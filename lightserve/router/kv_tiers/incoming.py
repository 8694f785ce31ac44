"""KV that prefill engines send for waiting requests of this engine.

A request with a ticket waits until there are slots for its prompt. Then the workers expect its KV in these slots, and
the dispatcher has a prefill engine compute it. When the ticket ends, what has come enters the prefix cache, where the
request finds it. It computes the rest itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from lightserve.io_struct import KvExpect, KvMissing, KvReceived, KvTicket, KvWanted
from lightserve.router.kv_pool import KvPool, PrefixLoad, cacheable
from lightserve.router.kv_tiers.tiers import ROOM_PER_REQ
from lightserve.router.radix_cache import common_len
from lightserve.router.req import Req
from lightserve.utils.block_hash import BLOCK_TOKENS

MIN_COMING_TOKENS = 32  # another request waits for the same prefix if it has so many more tokens than the cache


class KvInbox(Protocol):
    """The workers that receive KV."""

    addresses: list[str]  # by rank

    def cancel(self, ticket: int) -> None:
        """End a ticket. The workers still report it."""


class OpenTicket(NamedTuple):
    req_id: int
    prefix: PrefixLoad


class IncomingKv:
    def __init__(self, pool: KvPool, send: Callable[[KvWanted | KvMissing], None]) -> None:
        """``send``: to the dispatcher."""
        self.num_wanted = 0  # tokens
        self.num_received = 0
        self.num_given_up = 0  # tokens that a prefill engine should have sent and that did not come
        self.num_recomputed = 0  # tokens that were received, and computed all the same
        self._pool = pool
        self._send = send
        self._inbox: KvInbox | None = None  # None: the workers are lost
        self._offers: dict[int, tuple[Req, KvTicket]] = {}  # by request: no slots are reserved yet
        self._open: dict[int, OpenTicket] = {}  # by ticket
        self._waiting: dict[int, int] = {}  # by request: its ticket
        self._received: dict[int, int] = {}  # by request that is not admitted yet: tokens that should be cached
        self._expects: list[KvExpect] = []  # for the next step
        self._cancelled: set[int] = set()  # open tickets that nobody sends KV for
        self._declined: set[int] = set()  # of these, tickets whose prompts no prefill engine has got

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted before their tickets end."""
        return len(self._waiting)

    def connect(self, inbox: KvInbox | None) -> None:
        self._inbox = inbox

    def offer(self, req: Req, ticket: KvTicket) -> None:
        """A prefill engine would compute the prompt of this request, which is not queued yet."""
        self._offers[req.req_id] = req, ticket

    def must_wait(self, req: Req, num_running: int) -> bool:
        """Whether a request may not be admitted yet, because its prompt comes from another engine."""
        if req.req_id in self._waiting:
            return True
        if not self._open and req.req_id not in self._offers:
            return False  # most requests end here
        cached = self._pool.cached_len(req)
        if self._is_coming(req, cached):
            return True
        if req.req_id not in self._offers or self._inbox is None:
            return False
        begin, end = cached // BLOCK_TOKENS, len(cacheable(req)) // BLOCK_TOKENS
        _, ticket = self._offers[req.req_id]
        if end * BLOCK_TOKENS - cached < ticket.min_tokens:
            self._decline(req.req_id)
            return False
        if self._pool.available - end * BLOCK_TOKENS < ROOM_PER_REQ * num_running:
            return False  # it does not fit, most likely: then it waits like others
        self._start(req, ticket, begin, end)
        return True

    def take_expects(self) -> list[KvExpect]:
        """What the next step tells the workers."""
        expects, self._expects = self._expects, []
        return expects

    @property
    def has_expects(self) -> bool:
        return bool(self._expects)

    def admitted(self, req: Req) -> None:
        """The request runs now, and computes what it has not cached."""
        self._decline(req.req_id)
        self.num_recomputed += max(self._received.pop(req.req_id, 0) - req.planned_len, 0)

    def drop(self, req_id: int) -> None:
        """The request has ended, or goes on in another engine."""
        self._offers.pop(req_id, None)
        self._received.pop(req_id, None)
        ticket = self._waiting.pop(req_id, None)
        if ticket is not None:
            self._cancel(ticket)

    def cancel(self, req_id: int, ticket: int, was_started: bool = True) -> None:
        """No prefill engine computes the prompt. The request waits until the workers have ended the ticket.

        ``was_started``: one had got it.
        """
        if self._waiting.get(req_id) == ticket:
            if not was_started:
                self._declined.add(ticket)
            self._cancel(ticket)

    def _cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)
        if self._inbox is not None:
            self._inbox.cancel(ticket)

    def finish(self, received: KvReceived) -> None:
        """The workers have ended a ticket."""
        opened = self._open.pop(received.ticket, None)
        if opened is None:  # all KV was lost meanwhile
            return
        prefix = self._pool.shorten_load(opened.prefix, received.num_blocks * BLOCK_TOKENS)
        self._pool.finish_load(prefix, is_valid=True)
        self.num_received += len(prefix.slots)
        missing = len(opened.prefix.slots) - len(prefix.slots)
        if received.ticket not in self._declined:
            self.num_given_up += missing
        if missing and received.ticket not in self._cancelled:
            self._send(KvMissing(opened.req_id, received.ticket))
        self._cancelled.discard(received.ticket)
        self._declined.discard(received.ticket)
        if self._waiting.get(opened.req_id) != received.ticket:
            return  # it has ended meanwhile, and may have come back with another ticket
        del self._waiting[opened.req_id]
        self._received[opened.req_id] = len(prefix.ids)
        req, _ = self._offers.pop(opened.req_id)
        if req.timeline is not None:
            req.timeline.kv("kv_received", len(prefix.slots))

    def clear(self) -> None:
        """All KV is lost. Requests that wait compute their prompts."""
        self._inbox = None
        expected = (opened for ticket, opened in self._open.items() if ticket not in self._declined)
        self.num_given_up += sum(len(opened.prefix.slots) for opened in expected)
        parts = (self._offers, self._open, self._waiting, self._received, self._expects)
        for part in (*parts, self._cancelled, self._declined):
            part.clear()

    def _start(self, req: Req, ticket: KvTicket, begin: int, end: int) -> None:
        if self._pool.stored is not None:
            self._pool.stored.keys_of(req, end * BLOCK_TOKENS)
        prefix = self._pool.start_load(req, begin * BLOCK_TOKENS, end * BLOCK_TOKENS)
        self._open[ticket.id] = OpenTicket(req.req_id, prefix)
        self._waiting[req.req_id] = ticket.id
        self._expects.append(KvExpect(ticket.id, prefix.slots, ticket.timeout_s))
        self.num_wanted += len(prefix.slots)
        addresses = [] if self._inbox is None else self._inbox.addresses
        if req.timeline is not None:  # before a prefill engine can begin
            req.timeline.kv("kv_wanted", len(prefix.slots))
        self._send(KvWanted(req.req_id, ticket.id, begin, end - begin, addresses))

    def _decline(self, req_id: int) -> None:
        found = self._offers.pop(req_id, None)
        if found is not None:
            self._send(KvWanted(req_id, found[1].id))

    def _is_coming(self, req: Req, cached: int) -> bool:
        """Whether a prefix of this request comes for another one."""
        if req.needs_prompt_computed:
            return False
        enough = cached + MIN_COMING_TOKENS
        others = (opened.prefix for opened in self._open.values() if opened.prefix.salt == req.salt)
        return any(common_len(cacheable(req), prefix.ids) >= enough for prefix in others)
