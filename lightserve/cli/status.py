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
    serving = Counter(replica.role for replica in status.replicas if replica.takes_requests)
    counts = [f"{serving[group.role]} of {group.wanted}{group.limits}" for group in status.groups]
    roles, by_role = [group.role for group in status.groups], status.gateway.by_role
    several = status.gateways if len(status.gateways) > 1 else []
    front = "HAProxy" if several else "gateway"
    output = [
        f"{status.name}: {status.by_role(counts)} serve, version {status.version}",
        f"{front} {gateway.state} at {gateway.address or '-'} {gateway.reason}".rstrip(),
        f"requests: {_load(load)}",
        *(f"{role}: {_load(by_role[role])}" for role in roles if role in by_role and len(roles) > 1),
        *(_gateway_line(number, gateway_status) for number, gateway_status in enumerate(several)),
        COLUMNS.format("replica", "role", "node", "address", "state", "restarts", "").rstrip(),
    ]
    for replica in status.replicas:
        process = replica.process
        state = "serving" if replica.takes_requests else "joining" if process.state == "serving" else process.state
        row = replica.replica, replica.role, replica.node[:8] or "-", process.address or "-", state, process.restarts
        output.append(COLUMNS.format(*row, process.reason).rstrip())
    output += [f"node {node[:8]} is drained" for node in status.drained_nodes]
    return output


def _load(load: Load) -> str:
    return f"{load.running:g} running, {load.waiting:g} waiting; KV {load.kv_usage:.0%}"


def _gateway_line(number: int, gateway: GatewayStatus) -> str:
    process = gateway.process
    location = f"on node {gateway.node[:8]}" if gateway.node else "without a node"
    return f"gateway {number} {process.state} at {process.address or '-'} {location} {process.reason}".rstrip()
