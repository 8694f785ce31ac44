"""``lightserve status``: the replicas of a deployment in a Ray cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightserve.cli.ray_flags import add_cluster_flags
from lightserve.config.parse import Parser

if TYPE_CHECKING:
    from lightserve.ray.messages import DeploymentStatus, GatewayStatus, Load

COLUMNS = "{:20} {:8} {:10} {:28} {:9} {:>8}  {}"


def arguments() -> Parser:
    parser = Parser(prog="lightserve status", description="Show the replicas of a deployment in a Ray cluster.")
    add_cluster_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    args = arguments().parse(argv)
    from lightserve.ray import client, cluster  # here, because Ray is an extra

    cluster.connect(args.ray_address)
    print("\n".join(lines(client.status(args.name))))
    return 0


def lines(status: DeploymentStatus) -> list[str]:
    gateway, load = status.gateway.process, status.gateway.load
    serving = Counter(one.role for one in status.replicas if one.takes_requests)
    counts = [f"{serving[group.role]} of {group.wanted}{group.limits}" for group in status.groups]
    roles, by_role = [group.role for group in status.groups], status.gateway.by_role
    several = status.gateways if len(status.gateways) > 1 else []
    front = "HAProxy" if several else "gateway"
    found = [
        f"{status.name}: {status.by_role(counts)} serve, version {status.version}",
        f"{front} {gateway.state} at {gateway.address or '-'} {gateway.reason}".rstrip(),
        f"requests: {_load(load)}",
        *(f"{role}: {_load(by_role[role])}" for role in roles if role in by_role and len(roles) > 1),
        *(_gateway_line(number, one) for number, one in enumerate(several)),
        COLUMNS.format("replica", "role", "node", "address", "state", "restarts", "").rstrip(),
    ]
    for one in status.replicas:
        state = "serving" if one.takes_requests else "joining" if one.process.state == "serving" else one.process.state
        row = one.replica, one.role, one.node[:8] or "-", one.process.address or "-", state, one.process.restarts
        found.append(COLUMNS.format(*row, one.process.reason).rstrip())
    found += [f"node {node[:8]} is drained" for node in status.drained_nodes]
    return found


def _load(load: Load) -> str:
    return f"{load.running:g} running, {load.waiting:g} waiting; KV {load.kv_usage:.0%}"


def _gateway_line(number: int, gateway: GatewayStatus) -> str:
    process = gateway.process
    place = f"on node {gateway.node[:8]}" if gateway.node else "without a node"
    return f"gateway {number} {process.state} at {process.address or '-'} {place} {process.reason}".rstrip()
