"""What planning a step costs, by its parts: microseconds, CPU time, the median of many steps.

    python -m lightserve.benchmark.scheduler [--running 1 64 256 512] [--cached 0 1000000] [--policy cache_aware]

All requests decode, one token each a step, two steps under way. ``waiting`` says who stands before the door: nobody,
64 requests while all seats are taken, or 64 requests while there are seats but no memory.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterable
from statistics import median

import numpy as np

from lightserve.io_struct import GenerationParams, Step, StepRow, Token, TokenOut
from lightserve.router.kv_pool import KvPool
from lightserve.router.limits import Limits
from lightserve.router.policy import POLICIES, make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler

PARTS = ("_make_room", "_admit", "_rows", "next_step", "take")
PROMPT_LEN = 1000
NUM_WAITING = 64
VOCAB_SIZE = 32_000
WAITING = ("none", "seats", "memory")


class TimedScheduler(Scheduler):
    """Notes how long its parts take."""

    def __init__(self, pool: KvPool, limits: Limits, policy: str) -> None:
        super().__init__(pool, limits, make_policy(policy))
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}

    def next_step(self, now_s: float = 0.0) -> Step | None:
        begin = time.thread_time()
        step = super().next_step(now_s)
        self.times["next_step"].append(time.thread_time() - begin)
        return step

    def take(self, outs: Iterable[TokenOut]) -> list[tuple[Req, TokenOut]]:
        begin = time.thread_time()
        taken = super().take(outs)
        self.times["take"].append(time.thread_time() - begin)
        return taken

    def _make_room(self) -> None:
        begin = time.thread_time()
        super()._make_room()
        self.times["_make_room"].append(time.thread_time() - begin)

    def _admit(self, now_s: float) -> list[Req]:
        begin = time.thread_time()
        admitted = super()._admit(now_s)
        self.times["_admit"].append(time.thread_time() - begin)
        return admitted

    def _rows(self) -> list[StepRow]:
        begin = time.thread_time()
        rows = super()._rows()
        self.times["_rows"].append(time.thread_time() - begin)
        return rows


def fill_cache(pool: KvPool, tokens: int, rng: np.random.Generator) -> None:
    """As if requests of PROMPT_LEN tokens had come and gone."""
    sampling = GenerationParams.of(seed=0)
    for _ in range(tokens // PROMPT_LEN):
        req = Req(0, rng.integers(0, VOCAB_SIZE, PROMPT_LEN).tolist(), sampling, 1, ())
        pool.open(req)
        req.begin()
        req.plan(pool.alloc(PROMPT_LEN - req.planned_len))
        pool.close(req)


def loaded(running: int, cached: int, waiting: str, policy: str) -> TimedScheduler:
    """A scheduler with so many requests that decode, and so many cached tokens."""
    rng = np.random.default_rng(0)
    most = 100_000
    need = running * (PROMPT_LEN + most)
    pool = KvPool(need + cached)
    fill_cache(pool, cached, rng)
    seats = running + (waiting == "memory")
    scheduler = TimedScheduler(pool, Limits(seats, 1 << 20, None), policy)
    sampling = GenerationParams.of(max_new_tokens=most, seed=0)
    num_waiting = 0 if waiting == "none" else NUM_WAITING
    for req_id in range(running + num_waiting):
        is_large = req_id >= running and waiting == "memory"
        prompt = rng.integers(0, VOCAB_SIZE, PROMPT_LEN).tolist()
        scheduler.add(Req(req_id, prompt, sampling, need + cached if is_large else most, ()))
    return scheduler


def measure(scheduler: TimedScheduler, steps: int) -> dict[str, float]:
    """Microseconds a part; the first steps, which prefill, do not count."""
    under_way: deque[list[TokenOut]] = deque()
    for number in range(steps + 4):
        while len(under_way) < 2 and (step := scheduler.next_step()):
            under_way.append([TokenOut(row.req_id, Token(1)) for row in step.rows])
        if number == 4:
            for times in scheduler.times.values():
                times.clear()
        scheduler.take(under_way.popleft())
    return {part: 1e6 * median(times) for part, times in scheduler.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.benchmark.scheduler", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--cached", type=int, nargs="+", default=[0, 1_000_000])
    parser.add_argument("--waiting", nargs="+", choices=WAITING, default=WAITING)
    parser.add_argument("--policy", choices=POLICIES, default="priority")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    print(
        f"{'running':>7} {'cached':>8} {'waiting':>8} "
        + " ".join(f"{part:>10}" for part in PARTS)
        + f" {'step+take':>10}"
    )
    for running in args.running:
        for cached in args.cached:
            for waiting in args.waiting:
                us = measure(loaded(running, cached, waiting, args.policy), args.steps)
                total = us["next_step"] + us["take"]
                parts = " ".join(f"{us[part]:10.0f}" for part in PARTS)
                print(f"{running:7} {cached:8} {waiting:>8} {parts} {total:10.0f}", flush=True)


if __name__ == "__main__":
    main()
