"""``lightserve deploy``: replicas of a model on the nodes of a Ray cluster, behind one port."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lightserve.cli.ray_flags import add_cluster_flags
from lightserve.config.commands import OF_ADAPTERS, SET_BY_DEPLOY
from lightserve.config.parse import Parser, parse_server, server_parser

PROG = "lightserve deploy"
USAGE = "%(prog)s [MODEL] --replicas N [flags of lightserve serve and lightserve engine]"


def arguments() -> Parser:
    parser = server_parser(PROG)
    parser.conflict_handler = "resolve"  # --roles is another flag than that of a server
    parser.usage, parser.description = USAGE, "Serve a model with several replicas on the nodes of a Ray cluster."
    parser.hide((*SET_BY_DEPLOY, *OF_ADAPTERS))
    _add_own(parser)
    parser._action_groups.insert(0, parser._action_groups.pop())  # --help explains the first group
    return parser


def _add_own(parser: Parser) -> None:
    group = parser.add_argument_group("Deployment")
    group.add_argument(
        "--replicas", metavar="N|MIN:MAX", help="number of engines; MIN:MAX: as many as the load needs; default: 1"
    )
    group.add_argument(
        "--roles",
        metavar="ROLE=N,...",
        help="instead of --replicas: numbers of engines that compute prompts and that generate, such as "
        "prefill=1:2,decode=2:4",
    )
    group.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="HTTP servers; several: on other nodes too, behind HAProxy"
    )
    group.add_argument("--dry_run", "--dry-run", action="store_true", help="print the placement, and deploy nothing")
    group.add_argument(
        *("--cpus_per_replica", "--cpus-per-replica"),
        type=float,
        metavar="X",
        help="CPUs that Ray reserves for a replica; default: 1 beside GPUs, else one for each rank",
    )
    group.add_argument(
        *("--target_queue", "--target-queue"),
        type=float,
        default=4.0,
        metavar="X",
        help="with MIN:MAX: waiting requests for each replica above which one is added",
    )
    group.add_argument(
        *("--scale_down_s", "--scale-down-s"),
        type=float,
        default=300.0,
        metavar="X",
        help="with MIN:MAX: seconds that the load must fit into fewer replicas before one is drained",
    )
    group.add_argument(
        *("--wait_s", "--wait-s"),
        type=float,
        default=1800.0,
        metavar="X",
        help="seconds until all replicas must serve; 0: do not wait",
    )
    add_cluster_flags(group)


def main(argv: Sequence[str]) -> int:
    begin_s = time.monotonic()
    arguments().parse(argv)  # --help and wrong flags need no more than this
    own_parser = Parser(prog=PROG, add_help=False)
    _add_own(own_parser)
    args, rest = own_parser.parse_known_args(argv)
    config = parse_server(rest, PROG)
    from lightserve.ray import client, cluster, flags  # here, because Ray is an extra

    deployment = flags.make_deployment(config, args.name, args.replicas, args.gateways, args.roles)
    cluster.connect(args.ray_address)
    nodes = cluster.nodes()
    deployment = flags.with_resources(deployment, flags.bundle_of(config, nodes, args.cpus_per_replica))
    deployment = flags.with_scaling(deployment, args.target_queue, args.scale_down_s)
    if args.dry_run:
        print("\n".join(client.dry_run(nodes, deployment)))
        return 0
    if warning := cluster.warning(nodes):
        _show(warning)
    is_new = client.apply(deployment)
    if args.wait_s:
        try:
            status = client.wait_until_serving(args.name, args.wait_s, _show)
        except client.CannotStartError:
            if is_new:  # with these flags it would fail for ever
                client.undeploy(args.name, timeout_s=0.0)
            raise
        replicas = status.by_role(str(group.wanted) for group in status.groups)
        print(f"{status.gateway.process.address} serves with {replicas} ({time.monotonic() - begin_s:.1f} s)")
    return 0


def _show(line: str) -> None:
    print(f"lightserve: {line}", file=sys.stderr, flush=True)
