"""The simulator beside real processes: the same requests at the same times, on several engines with null workers.

    python -m benchmark.cluster.simulated_replicas --replicas 3 --runs 3
    python -m benchmark.cluster.simulated_replicas --replicas 3 --runs 3 --load sessions

A step of a null worker takes --step_ms, and --token_us more for each token. The simulator gets these times, and two
more that a request which is alone shows: what a step takes beyond its own time, and what a first token takes on its way
through HTTP, dispatcher and detokenizer. Everything else is simulated. Other flags go to the server.

Real processes have pauses that no simulation has, if the machine has fewer cores than threads that want one. Each run
says how long the threads of the server waited for a core during long pauses, and at any other time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from benchmark.cluster.core_waits import CoreWaits
from benchmark.serving.server import Server
from lightserve.bench.client.connection import Connection, Target, target_of
from lightserve.bench.client.record import Record
from lightserve.bench.client.stream import StreamedResponse
from lightserve.cluster.routing import DEFAULT_POLICY, POLICIES
from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate.gpu import CostModel
from lightserve.simulate.load import Load, SimulatedRequest, fixed, lognormal
from lightserve.simulate.replica import Setup
from lightserve.simulate.simulation import simulate

LOAD = Load(
    lognormal(60, 0.8, 400), lognormal(40, 0.6, 120), count=200, rate=8.0, max_new_tokens=120, ends_by_length=True,
    num_prefixes=12, prefix_len=512,
)  # fmt: skip
SESSIONS = Load(  # 24 requests/s are two thirds of what three engines can do
    lognormal(60, 0.8, 400), lognormal(40, 0.6, 120), count=600, rate=24.0, max_new_tokens=120, ends_by_length=True,
    num_prefixes=4, prefix_len=128, turns=3, think_s=4.0,
)  # fmt: skip
LOADS = {"shared": LOAD, "sessions": SESSIONS}
ALONE = Load(fixed(64), fixed(24), count=8, max_new_tokens=24, ends_by_length=True, seed=1_000_000)
LIMITS = SchedulerLimits(64, 512, 256)
LONG_PAUSE = 3.0  # steps of one token
POOL_SIZE = 8_000  # tokens of an engine: not all prefixes fit


@dataclass(frozen=True, slots=True)
class Times:
    """What steps take, and what comes on top."""

    step_s: float
    token_s: float
    between_s: float = 0.0  # from the end of a step to the begin of the next
    way_s: float = 0.0  # of a request and its first token through all processes

    @property
    def cost(self) -> CostModel:
        step_ms, none = (self.step_s + self.between_s) * 1e3, float("inf")
        return CostModel(((0, step_ms), (1000, step_ms + 1e6 * self.token_s)), 0, none, none, (0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    hit_rate: float

    def values(self) -> list[float]:
        return [getattr(self, name) for name in self.__slots__]


def simulated(times: Times, load: Load, replicas: int, policy: str) -> Figures:
    setup = Setup("fifo", LIMITS, pool_size=POOL_SIZE, depth=1, lead_s=0.0, cost=times.cost)
    result = simulate(setup, load, replicas, policy)
    p50, p99 = np.percentile(result.ttft, [50, 99]) + times.way_s
    seconds = result.seconds - next(load.arrivals())
    return Figures(
        tokens_s=result.output_tokens / seconds,
        ttft_p50_ms=float(p50) * 1e3,
        ttft_p99_ms=float(p99) * 1e3,
        itl_p50_ms=result.itl(0.5) * 1e3,
        itl_p99_ms=result.itl(0.99) * 1e3,
        hit_rate=100 * result.hit_rate,
    )


def figures_of(records: list[Record]) -> Figures:
    ttfts = [record.ttft_s for record in records]
    itls = [gap for record in records for gap in record.itls_s]
    seconds = max(record.event_times[-1] for record in records) - min(record.sent for record in records)
    cached = sum(record.cached_tokens for record in records) / sum(record.input_tokens or 0 for record in records)
    ttft, itl = (np.percentile(values, [50, 99]) * 1e3 for values in (ttfts, itls))
    tokens = sum(record.output_tokens or 0 for record in records)
    return Figures(tokens / seconds, float(ttft[0]), float(ttft[1]), float(itl[0]), float(itl[1]), 100 * cached)


async def send_all(target: Target, load: Load) -> list[Record]:
    """Every request at its time, or one after the other if the load has no rate."""
    requests = list(load.requests())
    if load.rate is None:
        begin = time.monotonic()
        return [await _send(target, request, number, begin) for number, request in enumerate(requests)]
    begin = time.monotonic()
    dues = [begin + at for at in load.arrivals()]
    async with asyncio.TaskGroup() as tasks:
        sent = [
            tasks.create_task(_send(target, request, number, due))
            for number, (request, due) in enumerate(zip(requests, dues, strict=True))
        ]
    return [task.result() for task in sent]


async def _send(target: Target, request: SimulatedRequest, number: int, due: float) -> Record:
    body = {
        "prompt": request.prompt_ids.tolist(),
        "max_tokens": request.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    message = target.request(json.dumps(body).encode())
    await asyncio.sleep(max(due - time.monotonic(), 0))
    record = Record(index=number, due=due)
    response = StreamedResponse(record)
    _, connection = await asyncio.get_running_loop().create_connection(Connection, target.host, target.port)
    record.sent = time.monotonic()
    try:
        await connection.exchange(message, response)
    finally:
        connection.close()
    response.finish()
    if record.error:
        raise RuntimeError(f"request {number}: {record.error}")
    return record


def pauses(records: list[Record], waits: CoreWaits, longer_than_s: float) -> str:
    """Long times between two tokens, and how long threads waited for a core during these and during others."""
    gaps = [gap for record in records for gap in itertools.pairwise(record.event_times)]
    long = [(begin, end) for begin, end in gaps if end - begin > longer_than_s]
    if not long:
        return f"no pause over {longer_than_s * 1e3:.0f} ms"
    length_s = median(end - begin for begin, end in long)
    first, last = min(begin for begin, _ in gaps), max(end for _, end in gaps)
    others = [(float(begin), float(begin) + length_s) for begin in np.arange(first, last - length_s, length_s)]
    return (
        f"{len(long)} of {len(gaps)} pauses are over {longer_than_s * 1e3:.0f} ms, the longest "
        f"{max(end - begin for begin, end in long) * 1e3:.0f} ms, the median {length_s * 1e3:.0f} ms: threads waited "
        f"{_waited(long, waits)} during them, {_waited(others, waits)} in any such time"
    )


def _waited(times: list[tuple[float, float]], waits: CoreWaits) -> str:
    found = [waits.during(begin, end) for begin, end in times]
    total, longest = median(one.sum_s for one in found), median(one.longest_s for one in found)
    return f"{total * 1e3:.0f} ms for a core (one of them {longest * 1e3:.0f})"


def server_flags(times: Times, replicas: int, policy: str) -> list[str]:
    return [
        *("--null_worker", "--null_step_ms", str(times.step_s * 1e3), "--null_token_us", str(times.token_s * 1e6)),
        *(("--dp", str(replicas), "--cluster_policy", policy) if replicas > 1 else ()),
        *("--running_max_req_size", str(LIMITS.max_running), "--batch_max_tokens", str(LIMITS.batch_max_tokens)),
        *("--chunked_prefill_size", str(LIMITS.chunk_size), "--max_total_token_num", str(POOL_SIZE)),
        *("--router_policy", "fifo", "--router_token_ratio", str(LIMITS.token_ratio), "--max_queue_size", "100000"),
    ]


def measure(times: Times, load: Load, replicas: int, policy: str, flags: list[str]) -> tuple[Times, Figures]:
    """Of real processes. Returns the times with what a request that is alone shows."""
    import uvloop

    server = Server([*server_flags(times, replicas, policy), *flags])
    try:
        target = target_of(server.wait_until_ready(), "/v1/completions", {})
        alone = uvloop.run(send_all(target, ALONE))
        with CoreWaits() as waits:
            records = uvloop.run(send_all(target, load))
    finally:
        server.stop()
    of_prompt_s, of_token_s = (times.step_s + count * times.token_s for count in (64, 1))
    between_s = median(gap for record in alone for gap in record.itls_s) - of_token_s
    way_s = median(record.ttft_s for record in alone) - of_prompt_s
    print(pauses(records, waits, LONG_PAUSE * of_token_s))
    return replace(times, between_s=max(between_s, 0.0), way_s=max(way_s, 0.0)), figures_of(records)


def median_of(figures: list[Figures]) -> Figures:
    return Figures(*(median(column) for column in zip(*(one.values() for one in figures), strict=True)))


def compare(times: Times, load: Load, replicas: int, policy: str, runs: int, flags: list[str]) -> list[Figures]:
    """The medians of runs of real processes, and of the simulations with the times that each run had."""
    real, fake = [], []
    for _ in range(runs):
        found, figures = measure(times, load, replicas, policy, flags)
        real.append(figures)
        fake.append(simulated(found, load, replicas, policy))
        print(
            f"run: {found.between_s * 1e3:.1f} ms between steps, {found.way_s * 1e3:.1f} ms way, load average "
            f"{os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return [median_of(real), median_of(fake)]


NAMES = ("tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "hit %")


def table(real: Figures, fake: Figures) -> str:
    rows = [
        f"{'':10} " + " ".join(f"{name:>9}" for name in NAMES),
        f"{'processes':10} " + " ".join(f"{value:9.1f}" for value in real.values()),
        f"{'simulated':10} " + " ".join(f"{value:9.1f}" for value in fake.values()),
    ]
    changes = [100 * (b / a - 1) for a, b in zip(real.values()[:-1], fake.values()[:-1], strict=True)]
    points = fake.hit_rate - real.hit_rate
    return "\n".join([*rows, f"{'':10} " + " ".join(f"{value:+8.1f}%" for value in changes) + f" {points:+9.1f}"])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--cluster_policy", choices=POLICIES, default=DEFAULT_POLICY)
    parser.add_argument("--step_ms", type=float, default=40.0)
    parser.add_argument("--token_us", type=float, default=100.0)
    parser.add_argument("--load", choices=LOADS, default="shared", help="shared prefixes, or sessions of several turns")
    parser.add_argument("--requests", type=int, help="instead of the load's")
    parser.add_argument("--rate", type=float, help="requests per second, instead of the load's")
    parser.add_argument("--runs", type=int, default=3, help="the table has the medians")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args, flags = arguments().parse_known_args()
    times = Times(args.step_ms / 1e3, args.token_us / 1e6)
    load = LOADS[args.load]
    load = replace(load, count=args.requests or load.count, rate=args.rate or load.rate, seed=args.seed)
    print(table(*compare(times, load, args.replicas, args.cluster_policy, args.runs, flags)))


if __name__ == "__main__":
    main()
