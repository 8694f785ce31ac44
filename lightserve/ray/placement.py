"""On which node each replica goes. Pure: ``lightserve deploy --dry_run`` and the controller ask the same function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightserve.ray.messages import NORMAL

HEAD_RESOURCE = "node:__internal_head__"  # which Ray gives to the head node alone


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    name: str  # its address
    free: Mapping[str, float]
    total: Mapping[str, float]


def place_replicas(
    nodes: Sequence[Node], bundle: Mapping[str, float], roles: Sequence[str], used: Iterable[tuple[str, str]] = ()
) -> list[str | None]:
    """The node of a replica of each role; None: there is no room. ``used``: nodes and roles of those that run already.

    Replicas are spread, first those of one role: a node that is lost takes as few of them as possible with it.
    """
    free = {node.id: dict(node.free) for node in nodes}
    of_role = Counter(used)
    replicas = Counter(node for node, _ in of_role.elements())
    placed: list[str | None] = []
    for role in roles:
        fitting = [node.id for node in nodes if fits(bundle, free[node.id])]
        if not fitting:
            placed.append(None)
            continue
        best = min(
            fitting, key=lambda node_id: (of_role[node_id, role], replicas[node_id], -_room(bundle, free[node_id]))
        )
        of_role[best, role] += 1
        replicas[best] += 1
        for resource, amount in bundle.items():
            free[best][resource] -= amount
        placed.append(best)
    return placed


def place_gateways(nodes: Sequence[Node], count: int) -> list[str | None]:
    """The node of each gateway; None: the head node. The others go round the other nodes."""
    others = [node.id for node in nodes if HEAD_RESOURCE not in node.total]
    return [None, *(others[number % len(others)] if others else None for number in range(count - 1))]


def fits(bundle: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(resource, 0.0) >= amount for resource, amount in bundle.items())


def _room(bundle: Mapping[str, float], free: Mapping[str, float]) -> float:
    """How many such replicas would fit."""
    return min((free.get(resource, 0.0) / amount for resource, amount in bundle.items() if amount), default=0.0)


def why_no_room(nodes: Sequence[Node], bundle: Mapping[str, float]) -> str:
    wanted = describe(bundle)
    if any(fits(bundle, node.total) for node in nodes):
        return f"no node has {wanted} free now"
    most = {resource: max((node.total.get(resource, 0.0) for node in nodes), default=0.0) for resource in bundle}
    return f"no node has {wanted}: a replica runs on one node, and the largest ones have {describe(most)}"


def describe(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {resource}" for resource, amount in resources.items())


def plan_lines(nodes: Sequence[Node], bundle: Mapping[str, float], roles: Sequence[str]) -> list[str]:
    """The placement, for people."""
    names = {node.id: f"node {node.id[:8]} ({node.name})" for node in nodes}
    placed = list(zip(roles, place_replicas(nodes, bundle, roles), strict=True))
    lines = [f"{_kind(role)} {index}: {names[node]}" for index, (role, node) in enumerate(placed) if node is not None]
    for role, missing in Counter(role for role, node in placed if node is None).items():
        replicas = f"1 {_kind(role)} has" if missing == 1 else f"{missing} {_kind(role)}s have"
        lines.append(f"{replicas} no place: {why_no_room(nodes, bundle)}")
    return lines


def _kind(role: str) -> str:
    return "replica" if role == NORMAL else f"{role} replica"
