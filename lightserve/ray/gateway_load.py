"""What several gateways say about the same engines, as one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.ray.messages import GatewayStatus, Load


def total_load(gateways: Sequence[GatewayStatus]) -> Load:
    """Each gateway counts the requests of all gateways in its engines, and besides those that wait in itself."""
    return _together([gateway.load for gateway in gateways])


def total_by_role(gateways: Sequence[GatewayStatus]) -> dict[str, Load]:
    roles = dict.fromkeys(role for gateway in gateways for role in gateway.by_role)
    return {
        role: _together([gateway.by_role[role] for gateway in gateways if role in gateway.by_role]) for role in roles
    }


def _together(loads: Sequence[Load]) -> Load:
    """What engines say is the same for all gateways. Each gateway itself decides which prompts decode engines
    compute."""
    running, waiting, kv_usage = (
        max(getattr(load, name) for load in loads) for name in ("running", "waiting", "kv_usage")
    )
    return Load(running, waiting, kv_usage, sum(load.local_prefill_tokens for load in loads))


def taken_by_all(gateways: Sequence[GatewayStatus]) -> list[str]:
    """Engines that get requests from every gateway that has engines at all: one may just have started."""
    taken = [set(gateway.taking) for gateway in gateways if gateway.taking]
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
