"""What several gateways say about the same engines, as one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.ray.messages import GatewayStatus, Load


def total_load(gateways: Sequence[GatewayStatus]) -> Load:
    """Each gateway counts the requests of all gateways in its engines, and besides those that wait in itself."""
    loads = [one.load for one in gateways]
    return Load(*(max(getattr(load, name) for load in loads) for name in ("running", "waiting", "kv_usage")))


def taken_by_all(gateways: Sequence[GatewayStatus]) -> list[str]:
    """Engines that get requests from every gateway that has engines at all: one may just have started."""
    taken = [set(one.taking) for one in gateways if one.taking]
    return sorted(taken[0].intersection(*taken)) if taken else []


def url_for_proxy(gateway: GatewayStatus) -> str | None:
    """Where HAProxy sends requests; "": nowhere; None: as before, because nothing is known now.

    A gateway that has just started gets none until it has an engine: it would refuse them at once, so it would have the
    fewest connections and get all of them.
    """
    if not gateway.node:  # no answer yet
        return None
    if gateway.process.state != "serving":
        return ""
    return gateway.process.address if gateway.taking else None
