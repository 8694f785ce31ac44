"""The router's loop without processes, on a clock that steps and arrivals move."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightserve.io_struct import GenerationParams, TokenOut
from lightserve.router.kv_pool import KvPool
from lightserve.router.limits import Limits
from lightserve.router.pace import LEAD_S
from lightserve.router.policy import make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from lightserve.router.token_budget import QUANTILE, OutputEstimate
from lightserve.simulate.gpu import EOS, H200, CostModel, Sequence, Worker
from lightserve.simulate.load import URGENT, Load

LIMITS = Limits(256, 8192, 256, sizes=(256, 384, 512, 768, 1024, 1280, 1536), token_ratio=0.85)  # on a GPU


@dataclass(frozen=True, slots=True)
class Setup:
    """A server: the scheduler's knobs, and the machine."""

    policy: str = "priority"
    limits: Limits = LIMITS
    quantile: float = QUANTILE
    pool_size: int = 900_000  # tokens: 0.9 of an H200's memory less the weights
    depth: int = 2  # steps under way at once
    lead_s: float = LEAD_S  # before the end of a step the next one is sent
    cost: CostModel = H200

    def scheduler(self) -> Scheduler:
        estimate = OutputEstimate(self.quantile)  # a constant of the server, a knob only here
        return Scheduler(KvPool(self.pool_size), self.limits, make_policy(self.policy), estimate)


@dataclass(slots=True)
class Result:
    seconds: float = 0.0  # simulated
    cpu_s: float = 0.0  # that the simulation took
    steps: int = 0
    requests: int = 0  # that ended
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, found in the cache
    peak_used: int = 0
    pauses: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    urgent_ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between tokens of a request
    gap_counts: array[int] = field(default_factory=lambda: array("q"))  # how often: most of a step's are the same

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def itl(self, share: float) -> float:
        """So many of the gaps between tokens are no longer than this."""
        return quantile(np.array(self.gaps), np.array(self.gap_counts), share)


def quantile(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], share: float) -> float:
    """Of values that occur ``counts`` times; the smallest one that ``share`` of them do not exceed; 0 of none."""
    if not len(values):
        return 0.0
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1])])


class Simulation:
    def __init__(self, setup: Setup, load: Load) -> None:
        self.scheduler = setup.scheduler()
        self.result = Result()
        self._worker = Worker(setup.cost)
        self._depth = setup.depth
        self._lead_s = setup.lead_s
        self._was_full = False
        self._asks = load.asks()
        self._arrivals = load.arrivals()
        self._next_s = next(self._arrivals, None)
        self._is_closed = load.rate is None  # who has an answer asks again
        self._ids = itertools.count()
        self._params = GenerationParams.of(max_new_tokens=load.max_new_tokens, seed=0)

    def run(self) -> Result:
        begin = time.thread_time()
        now = free_s = 0.0  # free_s: when the worker has done all it was given
        under_way: deque[tuple[float, list[TokenOut]]] = deque()
        while True:
            self._arrive(now)
            while len(under_way) < self._depth and not self._is_early(now, free_s, under_way):
                step = self.scheduler.next_step(now)
                if step is None:
                    break
                seconds, outs = self._worker.run(step)
                free_s = max(now, free_s) + seconds
                under_way.append((free_s, outs))
                self._was_full = self.scheduler.num_waiting > 0
                self.result.steps += 1
                self.result.peak_used = max(self.result.peak_used, self.scheduler.pool.used)
            events = [under_way[0][0]] if under_way else []
            if len(under_way) < self._depth:
                due_s = free_s - self._lead_s if self._is_early(now, free_s, under_way) else self._next_s
                events += [] if due_s is None else [due_s]
            if not events:
                break
            now = min(events)
            if under_way and under_way[0][0] == now:
                self._take(under_way.popleft()[1], now)
        if self.scheduler.num_waiting or self.scheduler.num_running:
            raise RuntimeError("the scheduler has requests and plans nothing")
        self.result.seconds, self.result.pauses = now, self.scheduler.num_pauses
        self.result.cpu_s = time.thread_time() - begin
        return self.result

    def _is_early(self, now: float, free_s: float, under_way: Sized) -> bool:
        """Whether the next step can wait: see Pace, which has to guess what is known here."""
        return len(under_way) > 0 and not self._was_full and now < free_s - self._lead_s

    def _arrive(self, now: float) -> None:
        while self._next_s is not None and self._next_s <= now:
            self._ask(self._next_s)
            self._next_s = next(self._arrivals, None)

    def _ask(self, now: float) -> None:
        ask = next(self._asks, None)
        if ask is None:
            return
        most = self._params.stopping.max_new_tokens
        req = Req(next(self._ids), ask.prompt_ids, self._params, most, (EOS,), now, ask.priority)
        self._worker.seqs[req.req_id] = Sequence(req.req_id, ask.output_len)
        self.scheduler.add(req)

    def _take(self, outs: list[TokenOut], now: float) -> None:
        since: dict[float, int] = {}  # when the last token was -> how many requests
        for req, _ in self.scheduler.take(outs):
            if req.first_token_s:
                since[req.last_token_s] = since.get(req.last_token_s, 0) + 1
            else:
                req.first_token_s = now
            req.last_token_s = now
            if req.finish_reason is not None:
                self._end(req, now)
        self.result.gaps.extend([now - last_s for last_s in since])
        self.result.gap_counts.extend(since.values())

    def _end(self, req: Req, now: float) -> None:
        result = self.result
        result.requests += 1
        result.output_tokens += len(req.output_ids)
        result.prompt_tokens += len(req.prompt_ids)
        result.cached_tokens += req.cached_len
        ttft = req.first_token_s - req.arrived_s
        (result.urgent_ttft if req.priority == URGENT else result.ttft).append(ttft)
        del self._worker.seqs[req.req_id]
        if self._is_closed:
            self._ask(now)


def simulate(setup: Setup, load: Load) -> Result:
    return Simulation(setup, load).run()
