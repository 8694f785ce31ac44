"""Run the real scheduler against a cost model of a GPU on a virtual clock, to compare policies and limits.

python -m lightserve.simulate --load shared --policies fifo cache_aware --batch_max_tokens 512 2048

python -m lightserve.simulate --load shared --policies fifo --rate 60 --replicas 4 8 --cluster_policy prefix session

python -m lightserve.simulate --load long --policies fifo --rate 12 --replicas 4 --roles prefill,decode,decode,decode

python -m lightserve.simulate --load sessions --policies fifo --rate 8 --pool 60000 --kv_ram_gb 20 --kv_disk_gb 200

python -m lightserve.simulate --policies fifo --requests 1000000 --rate 800 --replicas 8 --clusters 2
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightserve.cluster import routing as cluster_routing
from lightserve.config import ClusterConfig
from lightserve.errors import OptionError
from lightserve.messages.control import StepLimits
from lightserve.router.policy import POLICIES, PolicyNames
from lightserve.router.scheduler import SchedulerLimits
from lightserve.router.token_budget import QUANTILE
from lightserve.simulate.clusters import simulate_clusters
from lightserve.simulate.frontend_latency import MEASURED_FRONTEND
from lightserve.simulate.kv_tiers import Store, Tiers
from lightserve.simulate.kv_transfer import NETWORK_BYTES_PER_S, Split
from lightserve.simulate.load import LOADS, URGENT, Load, fixed
from lightserve.simulate.replica import LIMITS, Setup
from lightserve.simulate.report import header, legend, plot, row_of
from lightserve.simulate.result import Result
from lightserve.simulate.shapes import SHAPES
from lightserve.simulate.simulation import Failure, simulate
from lightserve.simulate.tiers import LATENCY_S, RATES, add_rate_flag


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    combinations = itertools.product(args.policies, args.token_ratio, args.quantile, args.batch_max_tokens, args.chunk)
    for policy, ratio, share, batch, chunk in combinations:
        limits = SchedulerLimits(
            args.max_running,
            batch,
            None if chunk < 0 else chunk or batch,
            preferred_step_tokens=tuple(args.sizes),
            token_ratio=ratio,
            num_drafts=args.drafts,
            weight_read_tokens=StepLimits(1).weight_read_tokens,
        )
        cost = SHAPES[args.shape].cost(args.tp)
        yield Setup(
            policy,
            limits,
            share,
            args.pool,
            args.depth,
            cost=cost,
            tokens_a_step=args.tokens_a_step,
            frontend=MEASURED_FRONTEND,
            tiers=tiers_of(args),
        )


def tiers_of(args: argparse.Namespace) -> Tiers | None:
    """Sizes are those of a server, or of the store that all have. Host memory has the rate for every card."""
    rates = {tier: rate * (args.tp if tier == "ram" else 1) for tier, rate in (RATES | dict(args.tier_rate)).items()}
    sizes = {"ram": args.kv_ram_gb, "disk": args.kv_disk_gb, "remote": args.kv_remote_gb}
    ram, *lower = (
        Store(tier, size * 1e9, rates[tier], LATENCY_S[tier], is_shared=tier == "remote")
        for tier, size in sizes.items()
    )
    used = tuple(store for store in lower if store.num_bytes)
    return Tiers(SHAPES[args.shape].kv_bytes, ram, used) if ram.num_bytes else None


def clusters(args: argparse.Namespace) -> Iterator[tuple[int, str | None]]:
    """Numbers of replicas, and policies between them. One replica needs no policy."""
    for replicas, policy in itertools.product(args.replicas, args.cluster_policy):
        if replicas > 1 or policy == args.cluster_policy[0]:
            yield replicas, policy if replicas > 1 else None


def roles_of(text: str) -> tuple[str, ...]:
    roles = text.split(",")
    try:
        ClusterConfig(dp=len(roles), roles=roles)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return tuple(roles)


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
    add("--policies", nargs="+", choices=PolicyNames(), default=list(POLICIES))
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
    add("--max_running", type=int, default=LIMITS.max_running, help="running_max_req_size")
    add("--pool", type=int, default=900_000, help="max_total_token_num")
    add(
        "--shape",
        choices=SHAPES,
        default="llama3-8b",
        help="of the model; only llama3-8b was measured",
    )
    add("--tp", type=int, default=1, help="cards of a server")
    add("--kv_ram_gb", type=float, default=0.0, help="host memory of a server for evicted KV")
    add("--kv_disk_gb", type=float, default=0.0, help="disk of a server below it")
    add("--kv_remote_gb", type=float, default=0.0, help="store of all servers below that")
    add_rate_flag(parser, "--tier_rate")
    add("--drafts", type=int, default=0, help="num_speculative_tokens")
    add("--tokens_a_step", type=float, default=1.0, help="of a request with drafts: accepted ones, and one more")
    add("--depth", type=int, default=2, help="steps in flight at once")
    add("--replicas", type=int, nargs="+", default=[1], help="servers behind one gateway")
    add("--roles", type=roles_of, metavar="ROLE,...", help="of the replicas: prefill, decode, both or normal")
    add("--network_gb_s", type=float, default=NETWORK_BYTES_PER_S / 1e9, help="GB per second that a card sends or gets")
    add("--cluster_policy", nargs="+", choices=cluster_routing.POLICIES, default=[cluster_routing.DEFAULT_POLICY])
    add(
        "--clusters",
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


def tiers_text(result: Result) -> str:
    """Shares of the prompt tokens that were loaded, and that were there and computed sooner."""
    share = 100 / max(result.prompt_tokens, 1)
    return "".join(
        f"  {tier} {share * hits:.1f} % (+ {share * result.tier_recomputed[tier]:.1f})"
        for tier, hits in result.tier_hits.items()
    )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if min(args.replicas) < 1:
        parser.error("--replicas: must be at least 1")
    if any(not 0 <= failed.replica < min(args.replicas) for failed in args.fail):
        parser.error(f"--fail: the replicas are 0 to {min(args.replicas) - 1}")
    if args.fail and min(args.replicas) == 1:
        parser.error("--fail: needs at least 2 replicas")
    if args.roles and args.replicas != [len(args.roles)]:
        parser.error(f"--roles: there are {len(args.roles)}; use --replicas {len(args.roles)}")
    if args.drafts < 0 or not 1 <= args.tokens_a_step <= 1 + args.drafts:
        parser.error(f"--tokens_a_step: with --drafts {args.drafts} it is from 1 to {1 + args.drafts}")
    if args.network_gb_s <= 0:
        parser.error("--network_gb_s: must be above 0")
    if not args.kv_ram_gb and (args.kv_disk_gb or args.kv_remote_gb):
        parser.error("--kv_disk_gb and --kv_remote_gb: need --kv_ram_gb, which KV passes through")
    if not 1 <= args.clusters <= args.requests:
        parser.error("--clusters: must be at least 1, and at most --requests")


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    check(parser, args)
    figures = None
    if args.plots:
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError:
            parser.error("--plots needs matplotlib: pip install matplotlib")
    load = load_of(args)
    split = Split(args.roles, bytes_per_s=args.network_gb_s * 1e9) if args.roles else None
    print(header())
    runs = []
    for setup in setups(args):
        for replicas, policy in clusters(args):
            run = partial(simulate, setup, replicas=replicas, policy=policy, failures=args.fail, split=split)
            result = simulate_clusters(run, load, args.clusters)
            runs.append((setup, result))
            name = "" if policy is None else f"  {replicas} replicas, {policy}"
            name += f", {','.join(args.roles)}" if args.roles else ""
            name += f", {args.clusters} cells" if args.clusters > 1 else ""
            print(row_of(setup, result) + name + tiers_text(result), flush=True)
    print(f"\ncolumns:\n{legend()}")
    if args.plots:
        plot(args.plots, figures, runs)


if __name__ == "__main__":
    main()
