"""A simulated server: the router's loop without processes. Its caller has the clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from lightserve.io_struct import Token, TokenOut
from lightserve.router.kv_pool import KvPool
from lightserve.router.policy import make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler, SchedulerLimits
from lightserve.router.token_budget import QUANTILE, OutputEstimate
from lightserve.simulate.gpu import H200, CostModel, StepTokens, Worker

LIMITS = SchedulerLimits(  # on a GPU
    256,
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
    lead_s: float = 3e-3  # the next step is sent so long before the end of a step: the launch lead of an H200
    cost: CostModel = H200

    def scheduler(self) -> Scheduler:
        estimate = OutputEstimate(self.quantile)  # a constant in the server, an option here
        return Scheduler(KvPool(self.pool_size), self.limits, make_policy(self.policy), estimate)


class EndedStep(NamedTuple):
    """The tokens of a step."""

    gaps: list[float]  # seconds since the last token of requests that go on
    gap_counts: list[int]  # so many requests have that gap
    others: list[Req]  # requests that got their first token, or perhaps their last


class Replica:
    """Call ``run`` when a request was added, and at ``due_s``."""

    def __init__(self, setup: Setup) -> None:
        self.scheduler = setup.scheduler()
        self.due_s = math.inf  # when something happens next, if no request is added
        self.steps = 0
        self.peak_used = 0
        self._worker = Worker(setup.cost)
        self._depth = setup.depth
        self._lead_s = setup.lead_s
        self._in_flight: deque[tuple[float, float, StepTokens]] = deque()  # end of each step, duration and tokens
        self._free_s = 0.0  # when the worker finishes its last step
        self._was_full = False

    def add(self, req: Req, output_len: int) -> None:
        """The simulated model generates ``output_len`` more tokens."""
        self._worker.add(req.req_id, output_len)
        self.scheduler.add(req)

    def end_step(self, now: float) -> EndedStep | None:
        """Give the tokens of the step that ends now to their requests; None: no step does."""
        if not self._in_flight or self._in_flight[0][0] != now:
            return None
        _, seconds, (req_ids, token_ids) = self._in_flight.popleft()
        self.scheduler.complete_step(seconds)
        is_known = self.scheduler.process_plain(req_ids, token_ids)
        gaps = self.scheduler.observe_gaps(req_ids[is_known], now)
        others = zip(req_ids[~is_known].tolist(), token_ids[~is_known].tolist(), strict=True)
        reqs = [self.scheduler.process_token(TokenOut(req_id, Token(token_id))) for req_id, token_id in others]
        return EndedStep(*gaps, [req for req in reqs if req is not None])

    def run(self, now: float) -> None:
        """Plan the steps that may be planned now."""
        while len(self._in_flight) < self._depth and not self._is_early(now):
            step = self.scheduler.next_step(now)
            if step is None:
                break
            seconds, outs = self._worker.run(step)
            self._free_s = max(now, self._free_s) + seconds
            self._in_flight.append((self._free_s, seconds, outs))
            self._was_full = self.scheduler.num_waiting > 0
            self.steps += 1
            self.peak_used = max(self.peak_used, self.scheduler.pool.used)
        self.due_s = self._in_flight[0][0] if self._in_flight else math.inf
        if len(self._in_flight) < self._depth and self._is_early(now):
            self.due_s = min(self.due_s, self._free_s - self._lead_s)

    def _is_early(self, now: float) -> bool:
        """Whether it is too early for the next step: the simulator knows what StepPacer estimates."""
        return len(self._in_flight) > 0 and not self._was_full and now < self._free_s - self._lead_s
