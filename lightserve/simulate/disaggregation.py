"""How many of some servers should compute prompts for the others: the load that every split keeps up with.

python -m lightserve.simulate.disaggregation --shape llama3-70b --tp 4 --servers 4 --prompt 4000 --output 200

Finds the highest rate that the servers keep up with, without roles and with 1, 2, ... prefill servers beside decode
servers. The cards are the same in every row, and every row has the best of three --itl_target_ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightserve.cluster import routing as cluster_routing
from lightserve.simulate.capacity import Slo, add_limits, highest_rate, load_of, setup_of
from lightserve.simulate.clusters import processes
from lightserve.simulate.kv_transfer import NETWORK_BYTES_PER_S, Split
from lightserve.simulate.load import Load, lognormal
from lightserve.simulate.result import Result
from lightserve.simulate.shapes import SHAPES, Shape
from lightserve.simulate.simulation import simulate

SIGMA = 0.5  # of lengths: 5 of 100 are longer than 2.3 times the median
LONGEST = 4  # times the median
PRECISION = 1.06  # of a rate
TARGETS = (0.6, 0.75, 0.9)  # of the longest time between two tokens: --itl_target_ms


class Scenario(NamedTuple):
    shape: Shape
    tp: int
    load: Load
    slo: Slo
    split: Split
    seconds: float


class BestSplit(NamedTuple):
    split: Split
    slo: Slo
    rate: float  # that all servers together keep up with; 0: none
    result: Result | None  # at that rate


def splits(servers: int, bytes_per_s: float) -> Iterator[Split]:
    """Without roles, and with any number of prefill servers."""
    yield Split(("normal",) * servers, bytes_per_s=bytes_per_s)
    for prefills in range(1, servers):
        yield Split(("prefill",) * prefills + ("decode",) * (servers - prefills), bytes_per_s=bytes_per_s)


def find(scenario: Scenario) -> BestSplit:
    """With the best of several targets."""
    return max((_find(scenario, target) for target in TARGETS), key=lambda best_split: best_split.rate)


def _find(scenario: Scenario, target: float) -> BestSplit:
    setup = setup_of(scenario.shape, scenario.tp, scenario.slo.itl_s, target)
    results: dict[float, Result] = {}

    def keeps_up(rate: float) -> bool:
        load = load_of(scenario.load, rate, scenario.seconds)
        results[rate] = simulate(
            setup, load, len(scenario.split.roles), cluster_routing.DEFAULT_POLICY, split=scenario.split
        )
        return scenario.slo.is_met(results[rate])

    rate = highest_rate(keeps_up, PRECISION)
    return BestSplit(scenario.split, scenario.slo, rate, results.get(rate))


def name_of(split: Split) -> str:
    prefills = split.roles.count("prefill")
    return f"{prefills}:{len(split.roles) - prefills}" if prefills else "none"


HEADER = "ITL ms  prefill:decode   req/s  TTFT p50  p99 ms  ITL p50  p99 ms"


def rows(best_splits: Sequence[BestSplit]) -> list[str]:
    """Of one SLO; the best one is marked."""
    best = max(split.rate for split in best_splits)
    return [_row(split, is_best=0 < split.rate == best) for split in best_splits]


def _row(best_split: BestSplit, is_best: bool) -> str:
    row = f"{best_split.slo.itl_s * 1e3:6.0f}  {name_of(best_split.split):>14}"
    if best_split.result is None or not best_split.rate:
        return f"{row}   no rate meets the limits"
    ttft = np.percentile(best_split.result.ttft, [50, 99]) * 1e3
    itl = [best_split.result.itl(share) * 1e3 for share in (0.5, 0.99)]
    mark = "  best" if is_best else ""
    return f"{row} {best_split.rate:7.2f} {ttft[0]:9.0f} {ttft[1]:7.0f} {itl[0]:8.1f} {itl[1]:7.1f}{mark}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.simulate.disaggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama3-70b")
    add("--tp", type=int, default=4, help="cards of a server")
    add("--servers", type=int, default=4)
    add("--prompt", type=int, default=4000, help="tokens: the median")
    add("--output", type=int, default=200, help="tokens: the median")
    add_limits(parser)
    add("--network_gb_s", type=float, default=NETWORK_BYTES_PER_S / 1e9, help="GB per second that a card sends or gets")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.servers < 2:
        parser.error("--servers: a split needs at least 2")
    if min(args.prompt, args.output, args.network_gb_s) <= 0:
        parser.error("--prompt, --output and --network_gb_s: must be above 0")
    shape = SHAPES[args.shape]
    if not shape.pool_size(args.tp):
        parser.error(f"--tp {args.tp}: the weights of {args.shape} do not fit")
    prompt, output = (lognormal(length, SIGMA, LONGEST * length) for length in (args.prompt, args.output))
    load = Load(prompt, output, max_new_tokens=LONGEST * args.output)
    tried = list(splits(args.servers, args.network_gb_s * 1e9))
    cases = [
        Scenario(shape, args.tp, load, Slo(args.ttft_ms / 1e3, itl_ms / 1e3), split, args.seconds)
        for itl_ms in args.itl_ms
        for split in tried
    ]
    print(HEADER)
    with processes(len(cases)) as run_all:
        best_splits = run_all(find, cases)
        for _ in args.itl_ms:
            print("\n".join(rows([next(best_splits) for _ in tried])), flush=True)


if __name__ == "__main__":
    main()
