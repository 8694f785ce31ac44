"""``lightserve drain``: replace a replica, or all replicas of a node, without losing a request."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.cli.ray_flags import add_cluster_flags
from lightserve.config.parse import Parser


def arguments() -> Parser:
    parser = Parser(
        prog="lightserve drain",
        description="Let a replica, or all replicas of a node, finish their requests, and start others elsewhere.",
    )
    parser.add_argument("target", metavar="REPLICA|NODE", help="as `lightserve status` shows it; of a node, its id")
    parser.add_argument("--undo", action="store_true", help="use a drained node again")
    add_cluster_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    args = arguments().parse(argv)
    from lightserve.ray import client, cluster  # here, because Ray is an extra

    cluster.connect(args.ray_address)
    if args.undo:
        client.resume(args.name, args.target)
        return 0
    print(f"{client.drain(args.name, args.target)} replicas of {args.target} are being replaced; see lightserve status")
    return 0
