"""``lightserve undeploy``: end a deployment in a Ray cluster, after its running requests."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.cli.ray_flags import add_cluster_flags
from lightserve.config.parse import Parser


def arguments() -> Parser:
    parser = Parser(prog="lightserve undeploy", description="End a deployment, after its running requests.")
    parser.add_argument("--wait_s", "--wait-s", type=float, default=60.0, metavar="X", help="then end it anyway")
    add_cluster_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    args = arguments().parse(argv)
    from lightserve.ray import client, cluster  # here, because Ray is an extra

    cluster.connect(args.ray_address)
    client.undeploy(args.name, args.wait_s)
    return 0
