"""How many cards a load needs, if first tokens and gaps between tokens may take so long.

python -m lightserve.simulate.capacity --shape llama3-70b --rate 40 --ttft_ms 1000 --itl_ms 25 50 100 --tp 2 4 8

Finds the highest rate that one simulated server keeps up with, then simulates as many servers as the whole load needs.
Simulated times differ from measured ones. So it does the same for servers whose steps take --error percent less, and
more; the range has the cards that these need.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightserve.cluster import routing as cluster_routing
from lightserve.simulate.clusters import processes
from lightserve.simulate.frontend_latency import MEASURED_FRONTEND
from lightserve.simulate.load import LOADS, Load
from lightserve.simulate.replica import LIMITS, Setup
from lightserve.simulate.result import Result
from lightserve.simulate.shapes import SHAPES, Shape
from lightserve.simulate.simulation import Failure, simulate

PRECISION = 1.15  # of a rate: the next one that is tried is so many times as high
MIN_RATE = 1 / 8  # requests per second: a server that does not keep up with it is of no use
MIN_REQUESTS = 20  # of a simulation
TARGET = 0.9  # of the longest time between two tokens: steps take a little longer than the scheduler estimates
MAX_CARDS = 64
NEVER_S = 1e9  # until a dead server comes back


class Slo(NamedTuple):
    """What 99 of 100 must not exceed."""

    ttft_s: float
    itl_s: float

    def is_met(self, result: Result) -> bool:
        return float(np.percentile(result.ttft, 99)) <= self.ttft_s and result.itl(0.99) <= self.itl_s


class Demand(NamedTuple):
    """What all servers have to serve together."""

    load: Load
    rate: float  # requests per second
    seconds: float  # of arrivals that are simulated
    lost: int = 0  # servers that die after a third of that time, and do not come back

    @property
    def failures(self) -> list[Failure]:
        return [Failure(self.seconds / 3, number, NEVER_S) for number in range(self.lost)]


class Plan(NamedTuple):
    tp: int
    slo: Slo
    rate: float  # that one server keeps up with; 0: none
    servers: int  # that the whole load needs; 0: no number of them suffices
    result: Result | None  # of all servers

    @property
    def cards(self) -> int:
        return self.tp * self.servers


def setup_of(shape: Shape, tp: int, itl_s: float, target: float = TARGET) -> Setup:
    """A server with ``--tp`` and ``--itl_target_ms``, a little below what 99 of 100 must not exceed."""
    target_s = target * itl_s
    limits = replace(LIMITS, long_prompt_step_s=target_s, max_step_s=target_s)
    return Setup("priority", limits, pool_size=shape.pool_size(tp), cost=shape.cost(tp), frontend=MEASURED_FRONTEND)


def load_of(load: Load, rate: float, seconds: float) -> Load:
    """The load at this rate for so long, and a few requests at least."""
    return replace(load, rate=rate, count=max(math.ceil(rate * seconds), MIN_REQUESTS))


def highest_rate(keeps_up: Callable[[float], bool], precision: float = PRECISION) -> float:
    """Requests per second, by bisection between powers of 2; 0: not even MIN_RATE."""
    high = MIN_RATE
    while keeps_up(high):
        high *= 2
    if high == MIN_RATE:
        return 0.0
    low = high / 2
    while high / low > precision:
        middle = math.sqrt(low * high)
        if keeps_up(middle):
            low = middle
        else:
            high = middle
    return low


def rate_of_one(setup: Setup, load: Load, slo: Slo, seconds: float) -> float:
    """The highest rate that one server keeps up with."""
    return highest_rate(lambda rate: slo.is_met(simulate(setup, load_of(load, rate, seconds))), PRECISION)


def plan(shape: Shape, tp: int, slo: Slo, demand: Demand, slowness: float = 1.0) -> Plan:
    """As many servers as the rate needs; more if they do not keep up, because they share the load unevenly or die.

    ``slowness``: steps take so many times as long as the cost model says.
    """
    load, rate, seconds, lost = demand
    setup = setup_of(shape, tp, slo.itl_s)
    setup = replace(setup, cost=setup.cost.scaled(slowness))
    if not setup.pool_size or not (of_one := rate_of_one(setup, load, slo, seconds)):
        return Plan(tp, slo, 0.0, 0, None)
    servers = max(math.ceil(rate / of_one), lost + 1)
    while servers * tp <= MAX_CARDS:
        policy = cluster_routing.DEFAULT_POLICY if servers > 1 else None
        result = simulate(setup, load_of(load, rate, seconds), servers, policy, demand.failures)
        if slo.is_met(result):
            return Plan(tp, slo, of_one, servers, result)
        servers += 1
    return Plan(tp, slo, of_one, 0, None)


class Estimate(NamedTuple):
    """What is needed as simulated, and if all steps take less or more."""

    plan: Plan
    bounds: Sequence[Plan]

    @property
    def least(self) -> int:
        """Cards; 0: the load is too much for any number of them."""
        return min((plan.cards for plan in (self.plan, *self.bounds) if plan.cards), default=0)

    @property
    def most(self) -> int:
        cards = [plan.cards for plan in (self.plan, *self.bounds)]
        return max(cards) if all(cards) else 0

    def __str__(self) -> str:
        return f"{self.least or 'none'}-{self.most or 'none'}"


def row_of(estimate: Estimate) -> str:
    plan = estimate.plan
    row = f"{plan.tp:3} {plan.slo.ttft_s * 1e3:8.0f} {plan.slo.itl_s * 1e3:7.0f} | {plan.rate:13.2f}"
    if plan.result is None:
        return f"{row}   none, with up to {MAX_CARDS} cards{f' (range {estimate})' if estimate.least else ''}"
    result = plan.result
    hours = plan.cards * result.seconds / 3600 / result.output_tokens * 1e6
    ttft_ms, itl_ms = float(np.percentile(result.ttft, 99)) * 1e3, result.itl(0.99) * 1e3
    return f"{row} {plan.servers:7} {plan.cards:5} {estimate!s:>8} {ttft_ms:8.0f} {itl_ms:7.1f} {hours:19.2f}"


HEADER = " tp  TTFT ms  ITL ms | req/s a server servers cards    range TTFT p99 ITL p99 card hours / M tok."


def plot(path: Path, figures: Any, estimates: Sequence[Estimate], title: str) -> None:
    """Cards against the time between two tokens, a line and a range for each tp."""
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for tp in sorted({estimate.plan.tp for estimate in estimates}):
        points = [estimate for estimate in estimates if estimate.plan.tp == tp and estimate.plan.cards]
        if points:
            itls = [estimate.plan.slo.itl_s * 1e3 for estimate in points]
            (line,) = axes.plot(itls, [estimate.plan.cards for estimate in points], marker="o", label=f"--tp {tp}")
            least, most = ([point.least for point in points], [point.most or MAX_CARDS for point in points])
            axes.fill_between(itls, least, most, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="ITL p99, ms", ylabel="cards", title=title, ylim=(0, MAX_CARDS))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _apply(find: Callable[..., Plan], point: tuple[int, Slo, float]) -> Plan:
    tp, slo, slowness = point
    return find(tp=tp, slo=slo, slowness=slowness)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Flags of the SLO, and how long it is tested."""
    add = parser.add_argument
    add("--ttft_ms", type=float, default=1000.0, help="99 of 100 first tokens come within this time")
    add("--itl_ms", type=float, nargs="+", default=[50.0], help="99 of 100 further tokens come so long after the last")
    add("--seconds", type=float, default=30.0, help="simulated time in which requests arrive")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.simulate.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama3-70b")
    add("--load", choices=LOADS, default="sharegpt")
    add("--rate", type=float, default=20.0, help="requests per second of the whole load")
    add_limits(parser)
    add("--tp", type=int, nargs="+", default=[1, 2, 4, 8], help="cards of a server")
    add("--lost", type=int, default=0, help="so many servers die after a third of that time, and the others must do")
    add("--error", type=float, default=10.0, help="percent by which steps may differ from the simulated ones")
    add("--plot", type=Path, metavar="FILE", help="write cards against ITL as a picture")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.lost < 0:
        parser.error("--lost: must be at least 0")
    if not 0 <= args.error < 100:
        parser.error("--error: must be a percentage from 0 to 100")
    figures = None
    if args.plot:
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    shape = SHAPES[args.shape]
    print(HEADER)
    estimates, error = [], args.error / 100
    slownesses = (1.0, 1 - error, 1 + error) if error else (1.0,)
    find = partial(plan, shape, demand=Demand(LOADS[args.load], args.rate, args.seconds, args.lost))
    slos = [(tp, Slo(args.ttft_ms / 1e3, itl_ms / 1e3)) for tp in args.tp for itl_ms in args.itl_ms]
    points = [(tp, slo, slowness) for tp, slo in slos for slowness in slownesses]
    with processes(len(points)) as run_all:
        plans = iter(run_all(partial(_apply, find), points))
        for _ in slos:
            simulated, *bounds = itertools.islice(plans, len(slownesses))
            estimates.append(Estimate(simulated, bounds))
            print(row_of(estimates[-1]), flush=True)
    if args.plot:
        title = f"{args.shape}, {args.rate:g} requests/s, TTFT p99 {args.ttft_ms:g} ms (simulated, estimated costs)"
        plot(args.plot, figures, estimates, title)


if __name__ == "__main__":
    main()
