"""KV that prefill engines send for waiting requests of this engine.

A request with a ticket waits until there are slots for its prompt. Then the workers expect its KV in these slots, and
the dispatcher has a prefill engine compute it. When the ticket ends, what has come enters the prefix cache, where the
request finds it. It computes the rest itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvCancel, KvMissing, KvTicket, KvWanted
from lightserve.messages.step import KvExpect
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.kv.pool import KvPool, PrefixLoad, cacheable
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.radix_cache import Ids, have_common_prefix
from lightserve.router.kv.source import Activity, KvInbox, KvSource, KvTransfers, KvWorkers, LoadContext
from lightserve.router.observability.stats import RouterMetrics
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait

MIN_COMING_TOKENS = 32  # another request waits for the same prefix if it has so many more tokens than the cache
GRACE_S = 10.0  # the workers end a ticket in time; if they do not, a request waits so much longer and then computes


PrefixKey = tuple[str, int, bytes]  # salt, the first token of a block, and the first tokens of the block


class OpenTicket(NamedTuple):
    req: Req
    prefix: PrefixLoad
    wait: Wait  # of its request, and of others with the same prefix


class IncomingKv(KvSource, PoolListener):
    def __init__(self, pool: KvPool, send: Callable[[KvWanted | KvMissing], None]) -> None:
        """``send``: to the dispatcher."""
        self.num_wanted = 0  # tokens
        self.num_received = 0
        self.num_given_up = 0  # tokens that a prefill engine should have sent and that did not come
        self.num_recomputed = 0  # tokens that were received, and computed all the same
        self._pool = pool
        self._send = send
        self._inbox: KvInbox | None = None  # None: the workers are lost
        self._open: dict[int, OpenTicket] = {}  # by ticket
        self._coming: dict[PrefixKey, OpenTicket] = {}  # the latest, by the first block that it brings
        self._ticket_of: dict[int, int] = {}  # by request: its open ticket
        self._received: dict[int, int] = {}  # by request that is not admitted yet: tokens that should be cached
        self._expects: list[KvExpect] = []  # for the next step
        self._cancelled: set[int] = set()  # open tickets that nobody sends KV for
        self._declined: set[int] = set()  # of these, tickets whose prompts no prefill engine has got
        pool.add_listener(self)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted before tickets end."""
        return sum(len(opened.wait.blocked) for opened in self._open.values())

    @property
    def expected_reqs(self) -> Sequence[Req]:
        """The requests that wait for tickets of their own."""
        return [opened.req for ticket, opened in self._open.items() if self._ticket_of.get(opened.req.req_id) == ticket]

    def connect(self, workers: KvWorkers, wake: Callable[[], None]) -> None:
        if workers.kv_inbox is None:
            return
        self.use_inbox(workers.kv_inbox)
        workers.kv_inbox.on_received = partial(self._on_received, wake)
        workers.kv_inbox.start()

    def use_inbox(self, inbox: KvInbox) -> None:
        """Whoever has it calls ``finish``."""
        self._inbox = inbox

    def _on_received(self, wake: Callable[[], None], received: KvReceived) -> None:
        self.finish(received)
        wake()

    def wait_of(self, req: Req, context: LoadContext) -> Wait | None:
        """What a request waits for before it is admitted: its prompt comes from another engine."""
        if req.kv_ticket is None and (context.is_prefetch or not self._open):
            return None  # most requests end here
        cached = self._pool.cached_len(req)
        return self._wait_for_coming(req, cached, context.now_s) or self._ask_for(req, cached, context)

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        transfers.expects += self._expects
        self._expects = []

    @property
    def has_expects(self) -> bool:
        """Whether the next step has something for the workers."""
        return bool(self._expects)

    def on_admitted(self, req: Req) -> None:
        self._decline(req)
        self.num_recomputed += max(self._received.pop(req.req_id, 0) - req.planned_len, 0)

    def drop(self, req: Req) -> None:
        self._received.pop(req.req_id, None)
        ticket = self._ticket_of.pop(req.req_id, None)
        if ticket is not None:
            self._cancel(ticket)

    def cancel(self, message: KvCancel) -> None:
        """No prefill engine computes the prompt. The request waits until the workers have ended the ticket."""
        if self._ticket_of.get(message.req_id) == message.ticket:
            if not message.was_started:
                self._declined.add(message.ticket)
            self._cancel(message.ticket)

    def _cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)
        if self._inbox is not None:
            self._inbox.cancel(ticket)

    def finish(self, received: KvReceived) -> None:
        """The workers have ended a ticket."""
        opened = self._open.pop(received.ticket, None)
        if opened is None:  # all KV was lost meanwhile
            return
        if self._coming.get(_key_of(opened.prefix)) is opened:
            del self._coming[_key_of(opened.prefix)]
        prefix = self._pool.shorten_load(opened.prefix, received.num_blocks * BLOCK_TOKENS)
        self._pool.finish_load(prefix, is_valid=True)
        self.num_received += len(prefix.slots)
        missing = len(opened.prefix.slots) - len(prefix.slots)
        if received.ticket not in self._declined:
            self.num_given_up += missing
        if missing and received.ticket not in self._cancelled:
            self._send(KvMissing(opened.req.req_id, received.ticket))
        self._cancelled.discard(received.ticket)
        self._declined.discard(received.ticket)
        opened.wait.end()
        if self._ticket_of.get(opened.req.req_id) != received.ticket:
            return  # it has ended meanwhile, and may have come back with another ticket
        del self._ticket_of[opened.req.req_id]
        self._received[opened.req.req_id] = len(prefix.ids)
        opened.req.timeline.kv("kv_received", len(prefix.slots))

    def on_reset(self) -> None:
        """The workers are lost. Requests that wait compute their prompts."""
        self._inbox = None
        expected = (opened for ticket, opened in self._open.items() if ticket not in self._declined)
        self.num_given_up += sum(len(opened.prefix.slots) for opened in expected)
        parts = (self._open, self._coming, self._ticket_of, self._received, self._expects)
        for part in (*parts, self._cancelled, self._declined):
            part.clear()

    def report(self, metrics: RouterMetrics) -> None:
        metrics.values["kv_split_requests_waiting"] = self.num_waiting
        metrics.values["kv_split_waited_tokens_total"] = self.num_wanted
        metrics.values["kv_split_received_tokens_total"] = self.num_received
        metrics.values["kv_split_given_up_tokens_total"] = self.num_given_up
        metrics.values["kv_split_recomputed_tokens_total"] = self.num_recomputed

    def _ask_for(self, req: Req, cached: int, context: LoadContext) -> Wait | None:
        """Have a prefill engine compute the prompt, if one was offered and it is worth it."""
        ticket = req.kv_ticket
        if ticket is None or self._inbox is None:
            return None
        begin, end = cached // BLOCK_TOKENS, len(cacheable(req)) // BLOCK_TOKENS
        if end * BLOCK_TOKENS - cached < ticket.min_tokens:
            self._decline(req)
            return None
        if not context.has_room(end * BLOCK_TOKENS):
            return None  # it does not fit either, most likely, and is asked again
        wait = Wait(context.now_s + ticket.timeout_s + GRACE_S, self._on_late)
        self._start(req, ticket, (begin, end), wait)
        return wait

    def _start(self, req: Req, ticket: KvTicket, blocks: tuple[int, int], wait: Wait) -> None:
        begin, end = blocks
        prefix = self._pool.start_load(req, begin * BLOCK_TOKENS, end * BLOCK_TOKENS)
        req.kv_ticket = None
        self._open[ticket.id] = self._coming[_key_of(prefix)] = OpenTicket(req, prefix, wait)
        self._ticket_of[req.req_id] = ticket.id
        self._expects.append(KvExpect(ticket.id, prefix.slots, ticket.timeout_s))
        self.num_wanted += len(prefix.slots)
        addresses = [] if self._inbox is None else self._inbox.addresses
        req.timeline.kv("kv_wanted", len(prefix.slots))  # before a prefill engine can begin
        self._send(KvWanted(req.req_id, ticket.id, begin, end - begin, addresses))

    def _on_late(self, req: Req) -> None:
        """The workers have not ended the ticket. Its slots stay reserved, and the request computes its prompt."""
        ticket = self._ticket_of.pop(req.req_id, None)
        if ticket is not None:  # if not, it waited for that of another request
            self._send(KvMissing(req.req_id, ticket))
            self._cancel(ticket)

    def _decline(self, req: Req) -> None:
        ticket, req.kv_ticket = req.kv_ticket, None
        if ticket is not None:
            self._send(KvWanted(req.req_id, ticket.id))

    def _wait_for_coming(self, req: Req, cached: int, now_s: float) -> Wait | None:
        """For the ticket that brings the next blocks of this request, which may be another's."""
        if req.needs_prompt_computed:
            return None
        ids = cacheable(req)
        opened = self._coming.get(_prefix_key(ids, req.salt, cached // BLOCK_TOKENS * BLOCK_TOKENS))
        if opened is None or now_s >= opened.wait.deadline_s:
            return None
        return opened.wait if have_common_prefix(ids, opened.prefix.ids, cached + MIN_COMING_TOKENS) else None


def _key_of(prefix: PrefixLoad) -> PrefixKey:
    return _prefix_key(prefix.ids, prefix.req.salt, len(prefix.cached))


def _prefix_key(ids: Ids, salt: str, begin: int) -> PrefixKey:
    return salt, begin, ids[begin : begin + MIN_COMING_TOKENS].tobytes()
