"""A simulated server: the router's loop without processes. Its caller has the clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from lightserve.messages.cluster import KvCancel, KvTarget, KvTransferParams, KvTransferTimeout, RemotePrefillRequest
from lightserve.messages.step import NO_DRAFTS, NO_TOKENS, DraftColumns, KvRecv, KvSend, TokenColumns
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.remote_prefill import RemoteKvSource
from lightserve.router.policy import make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, SchedulerLimits
from lightserve.router.token_budget import QUANTILE, OutputEstimate
from lightserve.simulate.decode_run import DecodeRun, DecodeRunScheduler
from lightserve.simulate.decode_times import DecodedStep, DecodeTimes
from lightserve.simulate.frontend_latency import NO_FRONTEND, FrontendLatency
from lightserve.simulate.gpu import H200, OTHER, CostModel, Worker
from lightserve.simulate.kv_tiers import SimulatedTiers, StoreBlocks, Tiers

MIN_DECODES = 2  # steps: fewer are planned one by one
MAX_DECODES = 64  # whose times are computed at once: another request comes before the end of most longer runs
MIN_SLACK_S = 1e-6  # from the end of a step to the planning of the next but one: far more than times are rounded by

LIMITS = SchedulerLimits(  # on an H200
    512,
    8192,
    256,
    preferred_step_tokens=(256, 384, 512, 768, 1024, 1280, 1536),
    token_ratio=0.85,
    long_prompt_step_s=20e-3,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A server: the scheduler's options, and the machine."""

    policy: str = "priority"
    limits: SchedulerLimits = LIMITS
    quantile: float = QUANTILE
    pool_size: int = 900_000  # tokens: 0.9 of an H200's memory less the weights
    depth: int = 2  # steps in flight at once
    lead_s: float = 3e-3  # from planning a step to its begin; steps are planned so early: the launch lead of an H200
    cost: CostModel = H200
    tokens_a_step: float = 1.0  # of a request with enough drafts
    frontend: FrontendLatency = NO_FRONTEND
    tiers: Tiers | None = None  # for KV that leaves the pool
    skips_planning: bool = True  # of steps that only decode; the figures are the same without it, and take longer

    def scheduler(self) -> DecodeRunScheduler:
        estimate = OutputEstimate(self.quantile)  # a constant in the server, an option here
        policy = make_policy(self.policy)
        return DecodeRunScheduler(GroupScheduler(KvPool(self.pool_size), self.limits, policy, estimate))


class EndedStep(NamedTuple):
    """The tokens of a step."""

    gaps: list[float]  # seconds since the last token of requests that go on
    gap_counts: list[int]  # so many requests have that gap
    others: list[Req]  # requests that got their first token, or perhaps their last
    sends: Sequence[KvSend] = ()  # KV that it computed for other servers
    num_tokens: int = 0  # if a request may have got several; 0: one each


class _InFlight(NamedTuple):
    end_s: float
    seconds: float
    tokens: TokenColumns | None  # None: the step belongs to the run of decodes
    sends: Sequence[KvSend] = ()
    prompt_tokens: int = 0
    drafts: DraftColumns = NO_DRAFTS


class SimulatedReceiver:
    """The workers of a decode server. The simulation knows which KV is on its way, and ends transfers itself."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def cancel(self, transfer_id: int) -> None:
        """Nothing to do."""


class Replica:
    """Call ``run`` when a request was added, and at ``due_s``."""

    def __init__(self, setup: Setup, role: str = "normal", shared_stores: dict[str, StoreBlocks] | None = None) -> None:
        """``shared_stores``: tiers that all servers have together, by name."""
        self.scheduler = setup.scheduler()
        self.role = role
        self.messages: list[RemotePrefillRequest | KvTransferTimeout] = []  # to the gateway
        self.recvs: list[KvRecv] = []  # that its steps have begun
        self.remote_kv = RemoteKvSource(self.scheduler.only_group.pool, self.messages.append)
        if role == "decode":
            self.remote_kv.use_receiver(SimulatedReceiver())
            self.scheduler.only_group.add_source(self.remote_kv)
        self.tiers: SimulatedTiers | None = None
        if setup.tiers is not None:
            self.tiers = SimulatedTiers(setup.tiers, self.scheduler, {} if shared_stores is None else shared_stores)
        self.due_s = math.inf  # when a step ends next, if no request is added
        self.steps = 0
        self.peak_used = 0
        self._worker = Worker(setup.cost, setup.tokens_a_step)
        self._cost = setup.cost
        self._depth = setup.depth
        self._lead_s = setup.lead_s
        self._skips = setup.skips_planning
        self._in_flight: deque[_InFlight] = deque()
        self._free_s = 0.0  # when the worker finishes its last step
        self._client_waits = False
        self._decodes: DecodeRun | None = None  # steps that the scheduler and the worker do not know of yet
        self._num_plain = 0  # so many such steps end no request
        self._ended_decodes = 0
        self._kv_read = 0  # by the next one of them
        self._last_end_s = 0.0  # of a step
        self._ahead: DecodeTimes | None = None  # of steps of the run, none of which is planned before it must be
        self._decoded: list[DecodedStep] = []

    def add(self, req: Req, output_len: int, now: float, transfer_params: KvTransferParams | None = None) -> None:
        """The simulated model generates ``output_len`` more tokens. ``transfer_params``: KV of its prompt may come."""
        self.settle(now)
        self._worker.add(req.req_id, output_len)
        req.kv_transfer_params = transfer_params
        self.scheduler.add(req)

    def add_job(self, job: Req, target: KvTarget, now: float) -> None:
        """Compute a prompt for another server."""
        job.target = target
        self.add(job, 1, now)

    def receive(self, received: KvReceived, now: float) -> None:
        """A transfer has ended: its KV has come, or as much of it as will."""
        self.settle(now)
        self.remote_kv.finish(received)

    def cancel_transfer(self, cancel: KvCancel, now: float) -> None:
        """Nobody computes the prompt."""
        self._end_ahead(now)
        self.remote_kv.cancel(cancel)

    def abort(self, req_id: int, now: float) -> None:
        self.settle(now)
        self.scheduler.abort(req_id)

    def settle(self, now: float) -> None:
        """Let the scheduler know all that has happened until now."""
        self._plan_until(now)
        self._end_decodes()

    def decoded(self, now: float) -> list[DecodedStep]:
        """The steps that have only decoded and ended before now. ``end_step`` returns them no more."""
        if self._ahead is not None:
            self._take_decoded(self._ahead, now)
        decoded, self._decoded = self._decoded, []
        return decoded

    def ends_step(self, now: float) -> bool:
        """Whether a step ends now, though ``due_s`` is later."""
        return self._ahead is not None and self._ahead.next_end_s == now

    def end_step(self, now: float) -> EndedStep | None:
        """Give the tokens of the step that ends now to their requests; None: no step does."""
        self._plan_until(now)
        if self.tiers is not None:
            self.tiers.advance(now)
        if not self._in_flight or self._in_flight[0].end_s != now:
            return None
        if self._in_flight[0].tokens is None and self._ended_decodes == self._num_plain:
            self._end_decodes()
        _, seconds, tokens, sends, prompt_tokens, drafts = self._in_flight.popleft()
        if self.tiers is not None:
            self.tiers.observe_step(prompt_tokens, seconds)
        last_end_s, self._last_end_s = self._last_end_s, now
        if tokens is None and self._decodes is not None:
            self._ended_decodes += 1
            return EndedStep([now - last_end_s], [len(self._decodes.rows)], [])
        tokens = tokens or NO_TOKENS
        self.scheduler.complete_step(seconds)
        self.scheduler.process_drafts(drafts)
        is_known = self.scheduler.process_plain(tokens)
        gaps = self.scheduler.observe_gaps(tokens.req_ids[is_known], now)
        others = groupby(tokens.where(~is_known).outs(), key=lambda out: out.req_id)
        processed = [self.scheduler.process_req(list(outs)) for _, outs in others]
        reqs = [req_tokens.req for req_tokens in processed if req_tokens is not None]
        return EndedStep(*gaps, reqs, sends, len(tokens.token_ids))

    def run(self, now: float) -> None:
        """Plan the steps that may be planned now."""
        self._end_ahead(now)
        self._plan_at(now)
        self._begin_ahead()

    def _plan_at(self, now: float) -> None:
        if self.tiers is not None:
            self.tiers.advance(now)
        while len(self._in_flight) < self._depth and not self._is_early(now):
            if not (self._plan_decode(now) or self._plan(now)):
                break
        self.due_s = min(self._in_flight[0].end_s if self._in_flight else math.inf, self._next_tier_s())

    def _next_tier_s(self) -> float:
        return math.inf if self.tiers is None else self.tiers.next_s

    def _plan_until(self, now: float) -> None:
        """Plan the steps that were due before now. Nothing has happened here since then."""
        self._end_ahead(now)
        while self._in_flight and len(self._in_flight) < self._depth and not self._client_waits:
            due_s = self._free_s - self._lead_s
            before = len(self._in_flight)
            if due_s < now:
                self._plan_at(due_s)
            if len(self._in_flight) == before:
                return

    def _plan(self, now: float) -> bool:
        self._end_decodes()
        step = self.scheduler.next_step(now)
        if step is None:
            return False
        seconds, tokens, drafts = self._worker.run(step)
        self._send(now, _InFlight(0.0, seconds, tokens, step.sends, step.num_prompt_tokens, drafts))
        self.recvs += step.recvs
        if self.tiers is not None:
            self.tiers.load(step.loads)
        return True

    def _plan_decode(self, now: float) -> bool:
        """Plan a step that decodes all requests, if it is clear that nothing else happens in it."""
        run = self._decodes or self._begin_decodes()
        if run is None or len(run) == run.max_steps or not run.plan():
            return False
        self._send(now, _InFlight(0.0, self._cost.step_s(len(run.rows), self._kv_read, 0.0), None))
        self._kv_read += len(run.rows)
        return True

    def _send(self, now: float, step: _InFlight) -> None:
        """It begins when it is launched and the step before has ended."""
        self._free_s = max(now + self._lead_s, self._free_s) + step.seconds
        self._in_flight.append(step._replace(end_s=self._free_s))
        self._client_waits = self.scheduler.only_group.queue.num_of_clients > 0
        self.steps += 1
        self.peak_used = max(self.peak_used, self.scheduler.only_group.pool.used)

    def _begin_decodes(self) -> DecodeRun | None:
        run = self.scheduler.begin_decodes() if self._skips else None
        if run is None:
            return None
        self._num_plain = self._worker.plain_steps(run.req_ids)
        if min(run.max_steps, self._num_plain) < MIN_DECODES:
            return None
        self._decodes, self._ended_decodes, self._kv_read = run, 0, self._worker.kv_len(run.req_ids)
        return run

    def _begin_ahead(self) -> None:
        """If nothing happens here but steps of the run for a while, and each is planned while one is in flight."""
        run = self._decodes
        if run is None or self._client_waits or self._depth < MIN_DECODES or not self._in_flight:
            return
        num_steps = min(min(run.max_steps, self._num_plain + 1) - len(run), run.num_fitting, MAX_DECODES)
        shortest_s = self._in_flight[0].seconds
        if num_steps < MIN_DECODES or shortest_s < self._lead_s + MIN_SLACK_S or self._in_flight[0].tokens is not None:
            return
        kv_read = self._kv_read + len(run.rows) * np.arange(num_steps)
        seconds = self._cost.decode_s(len(run.rows), kv_read).tolist()
        in_flight = [(step.end_s, step.seconds) for step in self._in_flight]
        self._ahead = DecodeTimes(in_flight, seconds, self._lead_s)
        self.due_s = min(self._ahead.ends[-1], self._next_tier_s())

    def _take_decoded(self, ahead: DecodeTimes, now: float) -> None:
        decoded = ahead.take_ended(now, self._last_end_s, len(self._decodes.rows) if self._decodes else 0)
        if decoded:
            self._decoded += decoded
            self._ended_decodes += len(decoded)
            self._last_end_s = decoded[-1].end_s

    def _end_ahead(self, now: float) -> None:
        """Plan the steps that were due before now, at once. Then ``due_s`` is when the first in flight ends."""
        ahead, run, self._ahead = self._ahead, self._decodes, None
        if ahead is None or run is None:
            return
        self._take_decoded(ahead, now)
        num_planned = ahead.num_planned(now) - ahead.num_begun
        run.plan_many(num_planned)
        self._kv_read += len(run.rows) * num_planned
        self.steps += num_planned
        self.peak_used = max(self.peak_used, self.scheduler.only_group.pool.used)
        self._in_flight = deque(_InFlight(end_s, seconds, None) for end_s, seconds in ahead.in_flight(now))
        self._free_s = self._in_flight[-1].end_s
        if self.tiers is not None:
            self.tiers.advance(ahead.last_event_s(now))
        self.due_s = min(self._in_flight[0].end_s, self._next_tier_s())

    def _end_decodes(self) -> None:
        run, self._decodes = self._decodes, None
        if run is None or not len(run):
            return
        self._worker.decode(run.req_ids, len(run))
        self.scheduler.end_decodes(run, [OTHER] * self._ended_decodes, self._last_end_s)
        last_ids = self._worker.last_ids(run.req_ids, len(run) - self._ended_decodes)
        self._in_flight = deque(
            step if step.tokens is not None else step._replace(tokens=TokenColumns(run.req_ids, next(last_ids)))
            for step in self._in_flight
        )

    def _is_early(self, now: float) -> bool:
        """Whether it is too early for the next step: the simulator knows what StepPacer estimates."""
        return len(self._in_flight) > 0 and not self._client_waits and now < self._free_s - self._lead_s
