"""The router's loop without processes, on a virtual clock that steps and arrivals advance."""

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
from lightserve.router.policy import make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler, SchedulerLimits
from lightserve.router.token_budget import QUANTILE, OutputEstimate
from lightserve.simulate.gpu import EOS, H200, CostModel, Sequence, Worker
from lightserve.simulate.load import URGENT, Load
from lightserve.utils.int_arrays import int32s

LIMITS = SchedulerLimits(  # on a GPU
    256, 8192, 256, preferred_step_tokens=(256, 384, 512, 768, 1024, 1280, 1536), token_ratio=0.85
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


@dataclass(slots=True)
class Result:
    seconds: float = 0.0  # simulated
    cpu_s: float = 0.0  # real time that the simulation took
    steps: int = 0
    requests: int = 0  # finished requests
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache
    peak_used: int = 0
    preemptions: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    urgent_ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))  # seconds between two tokens of a request
    gap_counts: array[int] = field(default_factory=lambda: array("q"))  # requests with that gap

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def itl(self, share: float) -> float:
        """The inter-token latency that ``share`` of the gaps do not exceed."""
        return quantile(np.array(self.gaps), np.array(self.gap_counts), share)


def quantile(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], share: float) -> float:
    """The smallest of the values, which occur ``counts`` times, that ``share`` of them do not exceed; 0 if empty."""
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
        self._requests = load.requests()
        self._arrivals = load.arrivals()
        self._next_s = next(self._arrivals, None)
        self._is_closed = load.rate is None  # a client sends its next request when the last one ends
        self._ids = itertools.count()
        self._params = GenerationParams.of(max_new_tokens=load.max_new_tokens, seed=0)

    def run(self) -> Result:
        begin = time.thread_time()
        now = free_s = 0.0  # free_s: when the worker finishes its last step
        in_flight: deque[tuple[float, list[TokenOut]]] = deque()
        while True:
            self._arrive(now)
            while len(in_flight) < self._depth and not self._is_early(now, free_s, in_flight):
                step = self.scheduler.next_step(now)
                if step is None:
                    break
                seconds, outs = self._worker.run(step)
                free_s = max(now, free_s) + seconds
                in_flight.append((free_s, outs))
                self._was_full = self.scheduler.num_waiting > 0
                self.result.steps += 1
                self.result.peak_used = max(self.result.peak_used, self.scheduler.pool.used)
            events = [in_flight[0][0]] if in_flight else []
            if len(in_flight) < self._depth:
                due_s = free_s - self._lead_s if self._is_early(now, free_s, in_flight) else self._next_s
                events += [] if due_s is None else [due_s]
            if not events:
                break
            now = min(events)
            if in_flight and in_flight[0][0] == now:
                self._process(in_flight.popleft()[1], now)
        if self.scheduler.num_waiting or self.scheduler.num_running:
            raise RuntimeError("the scheduler has requests but plans no step")
        self.result.seconds, self.result.preemptions = now, self.scheduler.num_preemptions
        self.result.cpu_s = time.thread_time() - begin
        return self.result

    def _is_early(self, now: float, free_s: float, in_flight: Sized) -> bool:
        """Whether it is too early for the next step: the simulator knows what StepPacer estimates."""
        return len(in_flight) > 0 and not self._was_full and now < free_s - self._lead_s

    def _arrive(self, now: float) -> None:
        while self._next_s is not None and self._next_s <= now:
            self._send(self._next_s)
            self._next_s = next(self._arrivals, None)

    def _send(self, now: float) -> None:
        request = next(self._requests, None)
        if request is None:
            return
        most = self._params.stopping.max_new_tokens
        req = Req(next(self._ids), int32s(request.prompt_ids), self._params, most, (EOS,), now, request.priority)
        self._worker.seqs[req.req_id] = Sequence(req.req_id, request.output_len)
        self.scheduler.add(req)

    def _process(self, outs: list[TokenOut], now: float) -> None:
        since: dict[float, int] = {}  # time of the last token -> requests
        for req, _ in self.scheduler.process_tokens(outs):
            if req.first_token_s:
                since[req.last_token_s] = since.get(req.last_token_s, 0) + 1
            else:
                req.first_token_s = now
            req.last_token_s = now
            if req.finish_reason is not None:
                self._record_finished(req, now)
        self.result.gaps.extend([now - last_s for last_s in since])
        self.result.gap_counts.extend(since.values())

    def _record_finished(self, req: Req, now: float) -> None:
        result = self.result
        result.requests += 1
        result.output_tokens += req.output_len
        result.prompt_tokens += len(req.prompt_ids)
        result.cached_tokens += req.cached_len
        ttft = req.first_token_s - req.arrived_s
        (result.urgent_ttft if req.priority == URGENT else result.ttft).append(ttft)
        del self._worker.seqs[req.req_id]
        if self._is_closed:
            self._send(now)


def simulate(setup: Setup, load: Load) -> Result:
    return Simulation(setup, load).run()
