"""Who runs next, and in which slots. Knows neither torch nor processes.

Every step carries one token of every request that decodes, and prompt chunks up to a budget. A request is admitted
while the peak of what all will hold fits the pool; where a guess of that was wrong, the newest request is paused, its
KV stays in the prefix cache while there is room, and it goes on later with the same text. Several steps may be planned
before the tokens of the first are back: workers run them in order, so what one step frees the next may use. When the
workers are lost, every request is a paused one whose KV is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import numpy as np

from lightserve.io_struct import ReqFailed, Step, StepRow, TokenOut
from lightserve.router.kv_pool import KvPool
from lightserve.router.limits import Limits
from lightserve.router.policy import Fifo, Policy
from lightserve.router.radix_cache import common_len
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
from lightserve.router.suspects import Suspects
from lightserve.router.token_budget import OutputEstimate, peak_tokens

SHARE_OF_OLDEST = 0.25  # of the prompt tokens of a step: a long prompt goes on beside any number of short ones
# Tokens: prompts of which fewer are left are computed in the order in which they came, before all others. Those with
# the least left first would give a TTFT p99 of 20 requests a second of 256 to 768 tokens that is 6 % longer.
SHORT_PROMPT = 1_024
WORTH_WAITING = 32  # tokens of a common prompt that another computes now: fewer are computed again


class Scheduler:
    def __init__(
        self,
        pool: KvPool,
        limits: Limits,
        policy: Policy | None = None,
        estimate: OutputEstimate | None = None,
    ) -> None:
        self.pool = pool
        self.num_pauses = 0
        self._limits = limits
        self._queue = ReqQueue(policy or Fifo())
        self._running: dict[int, Req] = {}  # in the order of admission
        self._estimate = estimate or OutputEstimate()
        self._left: list[int] = []  # requests the workers must forget
        self._suspects = Suspects()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_suspects(self) -> bool:
        """While it has, no step may be planned before the tokens of the last are back: see Suspects."""
        return bool(self._suspects)

    def add(self, req: Req) -> None:
        self._queue.add(req)

    def next_step(self, now_s: float = 0.0) -> Step | None:
        """What to compute next; None when there is nothing that the steps under way do not do already."""
        self._make_room()
        admitted = {req.req_id: req.as_new() for req in self._admit(now_s)}
        rows = self._rows()
        new = [entry for req_id, entry in admitted.items() if req_id in self._running]
        self._left = [req_id for req_id in self._left if req_id not in admitted]  # paused before the workers knew it
        if not rows and not new and not (self._left and not self._running):
            return None  # freed rows of the table can wait for the next step, unless none will come
        left, self._left = self._left, []
        return Step(rows, new, left)

    def take(self, outs: Iterable[TokenOut]) -> list[tuple[Req, TokenOut]]:
        """Give every token to its request, for who need not know how each stood after it."""
        taken = [(self.take_one(out), out) for out in outs]
        return [(req, out) for req, out in taken if req is not None]

    def take_one(self, out: TokenOut) -> Req | None:
        """Give a token to its request and release that if it is done; None if it is gone, and the token with it."""
        req = self._running.get(out.req_id) or self._queue.paused(out.req_id)
        if req is None or not (req.in_flight or out.is_forced):  # it ended or was aborted meanwhile
            return None
        req.take(out)
        self._suspects.acquit(req)
        if req.finish_reason is not None:
            if req.max_new_tokens > 1:  # a step of a beam search makes one token, and says nothing of answers
                self._estimate.learn(len(req.output_ids))
            self._drop(req)
        return req

    def fail(self, failure: ReqFailed) -> Req | None:
        """End a request for which a step brought an error; None if it ended meanwhile."""
        req = self._running.get(failure.req_id) or self._queue.paused(failure.req_id)
        if req is None or not req.in_flight:
            return None
        req.fail(failure)
        self._suspects.acquit(req)
        self._drop(req)
        if failure.status >= 500:
            self.pool.discard(req)
        return req

    def abort(self, req_id: int) -> Req | None:
        """Drop a request wherever it is; None if it is gone already."""
        req = self._running.get(req_id) or self._queue.find(req_id)
        if req is not None:
            self._drop(req)
        return req

    def abort_all(self) -> list[Req]:
        return self._drop_all(lambda req: True)

    def expire(self, now_s: float) -> list[Req]:
        """Drop the requests whose time is over."""
        return self._drop_all(lambda req: req.deadline_s is not None and req.deadline_s <= now_s)

    def lose_kv(self, under_way: Collection[int]) -> Req | None:
        """The workers died, and new ones know nothing: all go on from their tokens. The request to blame, dropped.

        ``under_way`` are the requests of the steps that were not back.
        """
        self.pool = KvPool(self.pool.size)
        self._left = []
        for req in self._running.values():
            self._queue.add_paused(req)
        self._running.clear()
        for req in self._queue:
            req.lose_kv()
        culprit = self._suspects.accuse([req for req in self._queue if req.req_id in under_way])
        if culprit is not None:
            self._drop(culprit)
        return culprit

    def _drop(self, req: Req) -> None:
        self._suspects.acquit(req)
        if req.req_id in self._running:
            self._release(req)
        else:
            self._queue.remove(req)

    def _release(self, req: Req) -> None:
        """It runs no more and gives back what it held."""
        self._suspects.adjourn(req)
        del self._running[req.req_id]
        self.pool.close(req)
        self._left.append(req.req_id)

    def _drop_all(self, is_meant: Callable[[Req], bool]) -> list[Req]:
        dropped = [req for req in (*self._queue, *self._running.values()) if is_meant(req)]
        for req in dropped:
            self._drop(req)
        return dropped

    def _make_room(self) -> None:
        """Pause until every request that decodes can have its next token; one alone always can."""
        while len(self._running) > max(1, self.pool.available):  # counted only where memory is short
            decoding = sum(req.unplanned == 1 for req in self._running.values())
            if decoding <= self.pool.available:
                return
            self._pause(self._newest())

    def _pause(self, req: Req) -> None:
        """Its tokens stay, its KV becomes cache; it goes on when there is room, ahead of the queue."""
        self._release(req)
        self._queue.add_paused(req)
        self.num_pauses += 1

    def _admit(self, now_s: float) -> list[Req]:
        admitted: list[Req] = []
        if not len(self._queue) or len(self._running) >= self._limits.max_running or self._suspects.on_trial:
            return admitted  # most steps end here: to order the queue costs
        unplanned = [(req, req.unplanned) for req in self._running.values()]
        decodes = sum(count == 1 for _, count in unplanned)
        prefilling = [req for req, count in unplanned if count > 1]
        whole = self._prompt_tokens(prefilling, decodes)
        share = whole if self._limits.chunk_size is None else math.ceil(whole * SHARE_OF_OLDEST)
        budget = whole - sum(min(count, share) for _, count in unplanned if count > 1)
        if budget <= 0:
            return admitted
        for req in self._queue.candidates(self.pool.cached_len):
            if len(self._running) >= self._limits.max_running or budget <= 0:
                break
            if req.in_flight or self._is_under_way(req, prefilling):
                continue
            is_suspect = req in self._suspects
            if (is_suspect and admitted) or not self._fits(req):
                break
            self._queue.remove(req)
            self._enter(req, now_s)
            budget -= min(req.unplanned, share)
            if req.is_prefilling:
                prefilling.append(req)
            admitted.append(req)
            if is_suspect:
                self._suspects.on_trial = req
                break
        return admitted

    def _is_under_way(self, req: Req, prefilling: list[Req]) -> bool:
        """Whether another request is computing a good part of its prompt: soon it will be in the cache."""
        rivals = [other for other in prefilling if other.salt == req.salt]
        if not rivals or req.needs_prompt_computed:
            return False
        enough = self.pool.cached_len(req) + WORTH_WAITING
        return any(common_len(req.prompt, other.prompt) >= enough for other in rivals)

    def _enter(self, req: Req, now_s: float) -> None:
        req.begin()
        if not req.output_ids:
            req.admitted_s = now_s
            req.cached_len = req.planned_len
        self._running[req.req_id] = req

    def _fits(self, req: Req) -> bool:
        """Whether the peak with it stays within the pool; if so, it holds what is cached of it."""
        self.pool.open(req)
        reqs = [*self._running.values(), req]
        made = np.array([one.planned_outputs for one in reqs])
        most = np.array([one.max_new_tokens for one in reqs])
        is_tight = self.pool.used >= self._limits.token_ratio * self.pool.size
        remaining = most - made if is_tight else self._estimate.remaining(made, most)
        held = made + np.array([len(one.prompt_ids) - one.shared_len for one in reqs])  # once all is planned
        if self.pool.shared_tokens + peak_tokens(held, remaining) <= self.pool.size or len(reqs) == 1:
            return True
        self.pool.close(req)
        return False

    def _rows(self) -> list[StepRow]:
        planned = self._counts()
        while not planned and self._is_stuck():
            self._pause(self._newest())
            planned = self._counts()
        slots = self.pool.alloc(sum(count for _, count in planned))
        rows = []
        begin = 0
        for req, count in planned:
            own = slots[begin : begin + count]
            begin += count
            is_prompt = req.planned_len < len(req.prompt_ids)
            req.plan(own)
            if is_prompt:
                self.pool.share(req)
            rows.append(StepRow(req.req_id, own))
        return rows

    def _counts(self) -> list[tuple[Req, int]]:
        """How many tokens of whom the next step computes: first all that decode, then of prompts."""
        on_trial = self._suspects.on_trial
        unplanned = [(req, req.unplanned) for req in ([on_trial] if on_trial else self._running.values())]
        counts = [entry for entry in unplanned if entry[1] == 1]
        prompts = [req for req, count in unplanned if count > 1]
        if prompts:
            split = self._whole_prompts if self._limits.chunk_size is None else self._parts_of_prompts
            counts += split(prompts, len(counts))
        return counts

    def _prompt_tokens(self, prompts: list[Req], decodes: int, context: float = 0.0) -> int:
        """Of the next step, in which ``prompts`` go on beside ``decodes`` others.

        Those that wait make steps longer, but not a long prompt, which would do so for long.
        """
        short = sum(req.unplanned <= SHORT_PROMPT for req in prompts)
        return self._limits.prompt_tokens(decodes, max(short + len(self._queue), 1), context)

    def _parts_of_prompts(self, prompts: list[Req], decodes: int) -> list[tuple[Req, int]]:
        """What comes late in a long prompt costs more, so that fewer tokens make a step as long."""
        parts = self._split(prompts, self._prompt_tokens(prompts, decodes), decodes)
        tokens = sum(count for _, count in parts)
        context = sum(count * req.planned_len for req, count in parts) / max(tokens, 1)
        return self._split(prompts, self._prompt_tokens(prompts, decodes, context), decodes) if context else parts

    def _split(self, prompts: list[Req], budget: int, decodes: int) -> list[tuple[Req, int]]:
        """Short prompts are first, so that a long one does not hold them up; the oldest has its share."""
        left = min(budget, self.pool.available - decodes)
        parts = {req.req_id: 0 for req in prompts}
        by_need = sorted(prompts, key=lambda req: (req.priority, max(req.unplanned, SHORT_PROMPT)))
        for req, most in ((prompts[0], math.ceil(budget * SHARE_OF_OLDEST)), *((req, budget) for req in by_need)):
            count = max(0, min(req.unplanned - parts[req.req_id], most, left))
            parts[req.req_id] += count
            left -= count
        return [(req, parts[req.req_id]) for req in prompts if parts[req.req_id]]

    def _whole_prompts(self, prompts: list[Req], decodes: int) -> list[tuple[Req, int]]:
        """In their order, the last of them if need be beyond the budget."""
        budget = self._prompt_tokens(prompts, decodes)
        room = self.pool.available - decodes
        counts = []
        for req in prompts:
            if budget > 0 and req.unplanned <= room:
                counts.append((req, req.unplanned))
                budget -= req.unplanned
                room -= req.unplanned
        return counts

    def _is_stuck(self) -> bool:
        """Prompts that cannot go on, and nobody on the way who will end and make room."""
        running = self._running.values()
        return len(running) > 1 and any(req.unplanned for req in running) and not any(req.in_flight for req in running)

    def _newest(self) -> Req:
        """Who is paused first: the least important, of those the latest."""
        return max(self._running.values(), key=lambda req: (req.priority, req.arrived_s, req.req_id))
