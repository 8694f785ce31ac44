"""Which KV tier pays: the time to load a prefix from it, beside the time to compute the prefix.

python -m lightserve.simulate.tiers --shape llama3-70b --tp 4 --tokens 512 2000 8000 --rate remote=12e9

Nothing is simulated here: it is the cost model of the simulator, and the rates that are given. The rates of a running
server are in its metrics (kv_tier_load_bytes_per_second), and its scheduler decides by them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from lightserve.simulate.gpu import CostModel
from lightserve.simulate.shapes import SHAPES, Shape

STEP_TOKENS = 2048  # of a prompt that is alone
# bytes per second: of a card for host memory (docs/kv_tiers.md), of a machine for the others
RATES = {"ram": 22e9, "disk": 6e9, "remote": 3e9}  # as measured on an H200; one NVMe drive; 25 Gbit/s
LATENCY_S = {"ram": 0.0, "disk": 0.2e-3, "remote": 1e-3}


def compute_s(cost: CostModel, tokens: int) -> float:
    """Of a prompt, in steps of its own."""
    seconds = 0.0
    for begin in range(0, tokens, STEP_TOKENS):
        count = min(STEP_TOKENS, tokens - begin)
        seconds += cost.step_s(count, 0, count * (begin + count / 2))
    return seconds


def load_s(shape: Shape, tp: int, tier: str, rate: float, tokens: int) -> float:
    """Every card loads its own part from host memory; the other tiers are the machine's."""
    return LATENCY_S[tier] + tokens * shape.kv_bytes / (rate * (tp if tier == "ram" else 1))


def least_rate(shape: Shape, tp: int, tier: str, tokens: int) -> float:
    """The bytes per second from which on a load takes as long as the computation."""
    seconds = compute_s(shape.cost(tp), tokens) - LATENCY_S[tier]
    return tokens * shape.kv_bytes / (tp if tier == "ram" else 1) / seconds


def rows(shape: Shape, tp: int, tokens: int, rates: Mapping[str, float]) -> list[str]:
    computed_s = compute_s(shape.cost(tp), tokens)
    lines = []
    for tier, rate in rates.items():
        loaded_s = load_s(shape, tp, tier, rate, tokens)
        verdict = f"pays, {computed_s / loaded_s:.1f} x faster" if loaded_s < computed_s else "does not pay"
        lines.append(
            f"{tp:3} {tokens:7} {computed_s * 1e3:10.1f} {tier:>7} {rate / 1e9:6.1f} {loaded_s * 1e3:8.1f} "
            f"{least_rate(shape, tp, tier, tokens) / 1e9:10.1f}  {verdict}"
        )
    return lines


HEADER = " tp  tokens compute ms    tier   GB/s  load ms least GB/s"


def rate_of(text: str) -> tuple[str, float]:
    tier, _, rate = text.partition("=")
    if tier not in RATES or float(rate) <= 0:
        raise ValueError
    return tier, float(rate)


def add_rate_flag(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        name,
        type=rate_of,
        nargs="+",
        default=[],
        metavar="TIER=BYTES",
        help=f"bytes per second of ram (of each card), disk or remote; default: {RATES}",
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.simulate.tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-70b")
    parser.add_argument("--tp", type=int, nargs="+", default=[4], help="cards of a server")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2000, 8000, 32000], help="of a prefix")
    add_rate_flag(parser, "--rate")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if min(*args.tp, *args.tokens) < 1:
        parser.error("--tp and --tokens: must be at least 1")
    print(HEADER)
    for tp in args.tp:
        for tokens in args.tokens:
            print(*rows(SHAPES[args.shape], tp, tokens, RATES | dict(args.rate)), sep="\n")


if __name__ == "__main__":
    main()
