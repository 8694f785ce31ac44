"""Run the real scheduler against a cost model of a GPU on a virtual clock, to compare policies and limits.

python -m lightserve.simulate --load shared --policies fifo cache_aware --batch_max_tokens 512 2048

python -m lightserve.simulate --load shared --policies fifo --rate 60 --replicas 4 8 --cluster_policy prefix session

python -m lightserve.simulate --policies fifo --requests 1000000 --rate 800 --replicas 8 --cells 2
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightserve.cluster import routing as cluster_routing
from lightserve.router.policy import POLICIES
from lightserve.router.scheduler import SchedulerLimits
from lightserve.router.token_budget import QUANTILE
from lightserve.simulate.cells import simulate_cells
from lightserve.simulate.load import LOADS, URGENT, Load, fixed
from lightserve.simulate.replica import LIMITS, Setup
from lightserve.simulate.report import header, legend, plot, row_of
from lightserve.simulate.simulation import Failure


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    combinations = itertools.product(args.policies, args.token_ratio, args.quantile, args.batch_max_tokens, args.chunk)
    for policy, ratio, share, batch, chunk in combinations:
        limits = SchedulerLimits(
            args.max_running,
            batch,
            None if chunk < 0 else chunk or batch,
            preferred_step_tokens=tuple(args.sizes),
            token_ratio=ratio,
        )
        yield Setup(policy, limits, share, args.pool, args.depth)


def clusters(args: argparse.Namespace) -> Iterator[tuple[int, str | None]]:
    """Numbers of replicas, and policies between them. One replica needs no policy."""
    for replicas, policy in itertools.product(args.replicas, args.cluster_policy):
        if replicas > 1 or policy == args.cluster_policy[0]:
            yield replicas, policy if replicas > 1 else None


def failure(text: str) -> Failure:
    at_s, replica, down_s = text.split(":")
    if float(down_s) <= 0:
        raise ValueError
    return Failure(float(at_s), int(replica), float(down_s))


def load_of(args: argparse.Namespace) -> Load:
    load = replace(LOADS[args.load], count=args.requests, rate=args.rate, streams=args.streams, seed=args.seed)
    changes: dict[str, Any] = {"urgent": args.urgent}
    for name in ("prompt_len", "output_len"):
        if getattr(args, name):
            changes[name] = fixed(getattr(args, name))
    for name in ("max_new_tokens", "num_prefixes", "prefix_len"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    return replace(load, **changes)


def arguments() -> argparse.ArgumentParser:
    doc = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.simulate",
        description=doc,
        epilog=f"columns:\n{legend()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--load", choices=LOADS, default="sharegpt")
    add("--requests", type=int, default=2000)
    add("--rate", type=float, help="requests per second, at random times; omitted: --streams")
    add("--streams", type=int, default=256, help="clients that send one request after the other")
    add("--prompt_len", type=int, help="instead of the load's lengths")
    add("--output_len", type=int, help="instead of the load's lengths")
    add("--max_new_tokens", type=int, help="limit of every request")
    add("--num_prefixes", type=int, help="distinct system prompts")
    add("--prefix_len", type=int, help="tokens of each")
    add("--urgent", type=float, default=0.0, help=f"share of requests with priority {URGENT}")
    add("--seed", type=int, default=0)
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    add("--token_ratio", type=float, nargs="+", default=[0.85], help="router_token_ratio")
    add(
        "--quantile",
        type=float,
        nargs="+",
        default=[QUANTILE],
        help="of recent output lengths: the estimate",
    )
    add("--batch_max_tokens", type=int, nargs="+", default=[LIMITS.batch_max_tokens])
    add(
        "--chunk",
        type=int,
        nargs="+",
        default=[LIMITS.chunk_size],
        help="chunked_prefill_size; 0: batch_max_tokens; -1: whole prompts",
    )
    add(
        "--sizes",
        type=int,
        nargs="*",
        default=LIMITS.preferred_step_tokens,
        help="tokens that a step with prompts may have",
    )
    add("--max_running", type=int, default=256, help="running_max_req_size")
    add("--pool", type=int, default=900_000, help="max_total_token_num")
    add("--depth", type=int, default=2, help="steps in flight at once")
    add("--replicas", type=int, nargs="+", default=[1], help="servers behind one gateway")
    add("--cluster_policy", nargs="+", choices=cluster_routing.POLICIES, default=[cluster_routing.DEFAULT_POLICY])
    add(
        "--cells",
        type=int,
        default=1,
        help="so many such clusters, each with a gateway, a seed and its share of the load",
    )
    add(
        "--fail",
        type=failure,
        nargs="+",
        default=[],
        metavar="AT:REPLICA:DOWN",
        help="a replica dies at this second, and serves again so many seconds later",
    )
    add("--plots", type=Path, metavar="DIR", help="write ttft.png and itl.png there")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if min(args.replicas) < 1:
        parser.error("--replicas: must be at least 1")
    if any(not 0 <= one.replica < min(args.replicas) for one in args.fail):
        parser.error(f"--fail: the replicas are 0 to {min(args.replicas) - 1}")
    if args.fail and min(args.replicas) == 1:
        parser.error("--fail: needs at least 2 replicas")
    if not 1 <= args.cells <= args.requests:
        parser.error("--cells: must be at least 1, and at most --requests")
    figures = None
    if args.plots:
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError:
            parser.error("--plots needs matplotlib: pip install matplotlib")
    load = load_of(args)
    print(header())
    runs = []
    for setup in setups(args):
        for replicas, policy in clusters(args):
            result = simulate_cells(setup, load, args.cells, replicas, policy, args.fail)
            runs.append((setup, result))
            name = "" if policy is None else f"  {replicas} replicas, {policy}"
            name += f", {args.cells} cells" if args.cells > 1 else ""
            print(row_of(setup, result) + name, flush=True)
    print(f"\ncolumns:\n{legend()}")
    if args.plots:
        plot(args.plots, figures, runs)


if __name__ == "__main__":
    main()
