"""Plans steps: which requests run next, and in which KV slots. Imports neither torch nor processes.

Every step carries one token of every request that decodes, and prompt chunks up to a budget. A request is admitted
while the peak of what all will hold fits the pool. If that estimate was wrong, the newest request is preempted: its KV
stays in the prefix cache while there is room, and it continues later with the same text. Several steps may be planned
before the tokens of the first are back: workers run them in order, so what one step frees the next may use. When the
workers die, every running request is preempted and its KV is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import numpy as np

from lightserve.io_struct import Step, StepRow, TokenOut
from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.kv_pool import KvPool
from lightserve.router.limits import Limits
from lightserve.router.policy import Fifo, Policy
from lightserve.router.radix_cache import common_len
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
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
        self.num_preemptions = 0
        self._limits = limits
        self._queue = ReqQueue(policy or Fifo())
        self._running: dict[int, Req] = {}  # in the order of admission
        self._estimate = estimate or OutputEstimate()
        self._left: list[int] = []  # requests the workers must forget
        self._isolation = CrashIsolation()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_isolating_crash(self) -> bool:
        """If so, no step may be planned before the tokens of the last are back: see CrashIsolation."""
        return self._isolation.is_active

    def add(self, req: Req) -> None:
        self._queue.add(req)

    def next_step(self, now_s: float = 0.0) -> Step | None:
        """What to compute next; None if there is nothing beyond the steps in flight."""
        self._make_room()
        admitted = {req.req_id: req.as_new() for req in self._admit(now_s)}
        rows = self._rows()
        new = [entry for req_id, entry in admitted.items() if req_id in self._running]
        self._left = [req_id for req_id in self._left if req_id not in admitted]  # not in the workers yet
        if not rows and not new and not (self._left and not self._running):
            return None  # freed rows of the table can wait for the next step, unless none will come
        left, self._left = self._left, []
        return Step(rows, new, left)

    def process_tokens(self, outs: Iterable[TokenOut]) -> list[tuple[Req, TokenOut]]:
        """Give every token to its request."""
        processed = [(self.process_token(out), out) for out in outs]
        return [(req, out) for req, out in processed if req is not None]

    def process_token(self, out: TokenOut) -> Req | None:
        """Give a token to its request, and release the request if it is finished. None if it has ended before."""
        req = self._running.get(out.req_id) or self._queue.find_preempted(out.req_id)
        if req is None or not (req.in_flight or out.is_forced):  # it ended or was aborted meanwhile
            return None
        req.add_token(out)
        self._isolation.clear(req)
        if req.finish_reason is not None:
            # neither a failure nor a step of a beam search, which makes one token, tells how long outputs are
            if req.max_new_tokens > 1 and req.error is None:
                self._estimate.learn(len(req.output_ids))
            self._drop(req)
            if req.error is not None and req.error_status >= 500:
                self.pool.discard(req)
        return req

    def abort(self, req_id: int) -> Req | None:
        """Drop a request, whether it waits or runs. None if it has ended."""
        req = self._running.get(req_id) or self._queue.find(req_id)
        if req is not None:
            self._drop(req)
        return req

    def abort_all(self) -> list[Req]:
        return self._drop_all(lambda req: True)

    def expire(self, now_s: float) -> list[Req]:
        """Drop the requests whose deadline has passed."""
        return self._drop_all(lambda req: req.deadline_s is not None and req.deadline_s <= now_s)

    def recover_from_crash(self, in_flight: Collection[int]) -> Req | None:
        """The workers died. All requests continue from their tokens in new workers, which hold no KV.

        ``in_flight``: the requests of the steps in flight. Returns the crashing request if it is known; it is dropped.
        """
        self.pool = KvPool(self.pool.size)
        self._left = []
        for req in self._running.values():
            self._queue.add_preempted(req)
        self._running.clear()
        for req in self._queue:
            req.reset_kv()
        crashing_request = self._isolation.record_crash([req for req in self._queue if req.req_id in in_flight])
        if crashing_request is not None:
            self._drop(crashing_request)
        return crashing_request

    def _drop(self, req: Req) -> None:
        self._isolation.clear(req)
        if req.req_id in self._running:
            self._release(req)
        else:
            self._queue.remove(req)

    def _release(self, req: Req) -> None:
        """Remove a request from the workers and free what it holds."""
        self._isolation.release(req)
        del self._running[req.req_id]
        self.pool.close(req)
        self._left.append(req.req_id)

    def _drop_all(self, is_meant: Callable[[Req], bool]) -> list[Req]:
        dropped = [req for req in (*self._queue, *self._running.values()) if is_meant(req)]
        for req in dropped:
            self._drop(req)
        return dropped

    def _make_room(self) -> None:
        """Preempt until every decoding request can have its next token. A single request always can."""
        while len(self._running) > max(1, self.pool.available):  # counted only where memory is short
            decoding = sum(req.unplanned == 1 for req in self._running.values())
            if decoding <= self.pool.available:
                return
            self._preempt(self._newest())

    def _preempt(self, req: Req) -> None:
        """Its KV stays in the prefix cache while there is room. It is admitted again before the queue."""
        self._release(req)
        self._queue.add_preempted(req)
        self.num_preemptions += 1

    def _admit(self, now_s: float) -> list[Req]:
        admitted: list[Req] = []
        if not len(self._queue) or len(self._running) >= self._limits.max_running or self._isolation.isolated:
            return admitted  # most steps end here, without ordering the queue
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
            if req.in_flight or self._is_being_computed(req, prefilling):
                continue
            runs_alone = self._isolation.needs_isolation(req)
            if (runs_alone and admitted) or not self._fits(req):
                break
            self._queue.remove(req)
            self._enter(req, now_s)
            budget -= min(req.unplanned, share)
            if req.is_prefilling:
                prefilling.append(req)
            admitted.append(req)
            if runs_alone:
                self._isolation.isolated = req
                break
        return admitted

    def _is_being_computed(self, req: Req, prefilling: list[Req]) -> bool:
        """Whether another request computes a long part of this prompt now, which will be in the cache soon."""
        others = [other for other in prefilling if other.salt == req.salt]
        if not others or req.needs_prompt_computed:
            return False
        enough = self.pool.cached_len(req) + WORTH_WAITING
        return any(common_len(req.prompt, other.prompt) >= enough for other in others)

    def _enter(self, req: Req, now_s: float) -> None:
        req.begin()
        if not req.output_ids:
            req.admitted_s = now_s
            req.cached_len = req.planned_len
        self._running[req.req_id] = req

    def _fits(self, req: Req) -> bool:
        """Whether the peak with this request fits the pool. If so, the request holds its cached tokens."""
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
            self._preempt(self._newest())
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
        """How many tokens of each request the next step computes: first one for each decode, then prompt tokens."""
        isolated = self._isolation.isolated
        unplanned = [(req, req.unplanned) for req in ([isolated] if isolated else self._running.values())]
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
        """Whether prompts have no memory to continue, and no request in flight can end and free some."""
        running = self._running.values()
        return len(running) > 1 and any(req.unplanned for req in running) and not any(req.in_flight for req in running)

    def _newest(self) -> Req:
        """The request to preempt first: the lowest priority, then the latest arrival."""
        return max(self._running.values(), key=lambda req: (req.priority, req.arrived_s, req.req_id))
