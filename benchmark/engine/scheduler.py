"""How long the scheduler takes to plan a step and to process its tokens: microseconds of CPU time, by part.

    python -m benchmark.engine.scheduler [--running 1 64 256 512] [--cached 0 1000000] [--policy cache_aware]

It runs the real scheduler without workers, and prints medians of many steps. All requests decode, with two steps in
flight. ``waiting`` says what the queue holds: nothing, 64 requests while the batch is full, or 64 requests that the
batch has room for but the KV pool has not.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from lightserve.messages.int_arrays import Int64Array
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import TokenColumns
from lightserve.router.kv.pool import KvPool
from lightserve.router.policy import POLICIES, make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits

PARTS = ("make_room", "admit", "plan", "next_step", "complete_step", "process_plain")
PROMPT_LEN = 1000
NUM_WAITING = 64
VOCAB_SIZE = 32_000
WAITING = ("none", "batch", "memory")


class TimedScheduler(Scheduler):
    """Measures how long its parts take."""

    def __init__(self, pool: KvPool, limits: SchedulerLimits, policy: str) -> None:
        super().__init__(GroupScheduler(pool, limits, make_policy(policy)))
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        group = self.only_group
        owners = (group.preemption, group.admission, group.planner, self, self, self)
        for owner, part in zip(owners, PARTS, strict=True):
            setattr(owner, part, _timed(getattr(owner, part), self.times[part]))


def _timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: object) -> Any:
        begin = time.thread_time()
        result = call(*args)
        times.append(time.thread_time() - begin)
        return result

    return timed


def fill_cache(pool: KvPool, tokens: int, rng: np.random.Generator) -> None:
    """Fill the cache as requests of PROMPT_LEN tokens would."""
    sampling = GenerationParams.of(seed=0)
    for _ in range(tokens // PROMPT_LEN):
        req = Req(0, rng.integers(0, VOCAB_SIZE, PROMPT_LEN, dtype=np.int32), sampling, 1, ())
        pool.attach_prefix(req)
        req.begin()
        req.plan(pool.alloc(PROMPT_LEN - req.planned_len))
        pool.release(req)


def loaded(running: int, cached: int, waiting: str, policy: str) -> TimedScheduler:
    """A scheduler with ``running`` decoding requests and ``cached`` cached tokens."""
    rng = np.random.default_rng(0)
    most = 100_000
    need = running * (PROMPT_LEN + most)
    pool = KvPool(need + cached)
    fill_cache(pool, cached, rng)
    max_running = running + (waiting == "memory")
    scheduler = TimedScheduler(pool, SchedulerLimits(max_running, 1 << 20, None), policy)
    sampling = GenerationParams.of(max_new_tokens=most, seed=0)
    num_waiting = 0 if waiting == "none" else NUM_WAITING
    for req_id in range(running + num_waiting):
        is_large = req_id >= running and waiting == "memory"
        prompt = rng.integers(0, VOCAB_SIZE, PROMPT_LEN, dtype=np.int32)
        scheduler.add(Req(req_id, prompt, sampling, need + cached if is_large else most, ()))
    return scheduler


def measure(scheduler: TimedScheduler, steps: int) -> dict[str, float]:
    """Microseconds of each part, without the first steps, which prefill."""
    in_flight: deque[Int64Array] = deque()  # the requests of each step
    for number in range(steps + 4):
        while len(in_flight) < 2 and (step := scheduler.next_step()):
            in_flight.append(np.array([row.req_id for row in step.rows], dtype=np.int64))
        if number == 4:
            for times in scheduler.times.values():
                times.clear()
        process(scheduler, in_flight.popleft())
    return {part: 1e6 * median(times) for part, times in scheduler.times.items()}


def process(scheduler: Scheduler, req_ids: Int64Array) -> None:
    """Every request of the step has got a token. Only the first one of a request is not plain."""
    scheduler.complete_step()
    tokens = TokenColumns(req_ids, np.ones(len(req_ids), dtype=np.int32))
    is_known = scheduler.process_plain(tokens)
    for out in tokens.where(~is_known).outs():
        scheduler.process_req([out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--cached", type=int, nargs="+", default=[0, 1_000_000])
    parser.add_argument("--waiting", nargs="+", choices=WAITING, default=WAITING)
    parser.add_argument("--policy", choices=POLICIES, default="priority")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    print(
        f"{'running':>7} {'cached':>8} {'waiting':>8} " + " ".join(f"{part:>14}" for part in PARTS) + f" {'total':>10}"
    )
    for running in args.running:
        for cached in args.cached:
            for waiting in args.waiting:
                us = measure(loaded(running, cached, waiting, args.policy), args.steps)
                total = sum(us[part] for part in ("next_step", "complete_step", "process_plain"))
                parts = " ".join(f"{us[part]:14.0f}" for part in PARTS)
                print(f"{running:7} {cached:8} {waiting:>8} {parts} {total:10.0f}", flush=True)


if __name__ == "__main__":
    main()
