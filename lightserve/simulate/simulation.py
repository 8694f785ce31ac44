"""A load on simulated servers, on a virtual clock that steps and arrivals advance."""

from __future__ import annotations

import itertools
import math
import time

from lightserve.io_struct import GenerationParams
from lightserve.router.req import Req
from lightserve.simulate.gpu import EOS
from lightserve.simulate.load import URGENT, Load
from lightserve.simulate.replica import EndedStep, Replica, Setup
from lightserve.simulate.result import Result
from lightserve.utils.int_arrays import int32s


class Simulation:
    def __init__(self, setup: Setup, load: Load) -> None:
        self.replica = Replica(setup)
        self.result = Result()
        self._requests = load.requests()
        self._arrivals = load.arrivals()
        self._next_s = next(self._arrivals, math.inf)
        self._is_closed = load.rate is None  # a client sends its next request when the last one ends
        self._ids = itertools.count()
        self._params = GenerationParams.of(max_new_tokens=load.max_new_tokens, seed=0)

    def run(self) -> Result:
        begin = time.thread_time()
        now = last_s = 0.0
        replica, result = self.replica, self.result
        while (now := min(self._next_s, replica.due_s)) < math.inf:
            if (ended := replica.end_step(now)) is not None:
                last_s = now
                self._process(ended, now)
            self._arrive(now)
            replica.run(now)
        if replica.scheduler.num_waiting or replica.scheduler.num_running:
            raise RuntimeError("the scheduler has requests but plans no step")
        result.seconds, result.preemptions = last_s, replica.scheduler.num_preemptions
        result.steps, result.peak_used = replica.steps, replica.peak_used
        result.cpu_s = time.thread_time() - begin
        return result

    def _arrive(self, now: float) -> None:
        while self._next_s <= now:
            self._send(self._next_s)
            self._next_s = next(self._arrivals, math.inf)

    def _send(self, now: float) -> None:
        request = next(self._requests, None)
        if request is None:
            return
        most = self._params.stopping.max_new_tokens
        req = Req(next(self._ids), int32s(request.prompt_ids), self._params, most, (EOS,), now, request.priority)
        self.replica.add(req, request.output_len)

    def _process(self, ended: EndedStep, now: float) -> None:
        self.result.gaps.extend(ended.gaps)
        self.result.gap_counts.extend(ended.gap_counts)
        for req in ended.others:
            if req.first_token_s:
                self.result.gaps.append(now - req.last_token_s)
                self.result.gap_counts.append(1)
            else:
                req.first_token_s = now
            req.last_token_s = now
            if req.finish_reason is not None:
                self._record_finished(req, now)

    def _record_finished(self, req: Req, now: float) -> None:
        result = self.result
        result.requests += 1
        result.output_tokens += req.output_len
        result.prompt_tokens += len(req.prompt_ids)
        result.cached_tokens += req.cached_len
        ttft = req.first_token_s - req.arrived_s
        (result.urgent_ttft if req.priority == URGENT else result.ttft).append(ttft)
        if self._is_closed:
            self._send(now)


def simulate(setup: Setup, load: Load) -> Result:
    return Simulation(setup, load).run()
