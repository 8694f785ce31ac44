"""Who of the waiting is next. A policy is a small class; --router_policy takes it by its name."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable

from lightserve.errors import ServerError
from lightserve.router.req import Req

AGING_S = 30.0  # waiting this long is worth one step of priority: nobody starves
LOOK_AHEAD = 64  # waiting requests that a policy may choose among

CachedLen = Callable[[Req], int]  # tokens of a request's prompt that are in the prefix cache now


class Policy(ABC):
    """Places a request in the queue when it comes, and may reorder the first of the queue when there is room."""

    name: str

    def rank(self, req: Req) -> float:
        """The lowest goes first; equal ones in the order in which they came. Fixed on arrival."""
        return 0.0

    def order(self, first: list[Req], cached_len: CachedLen) -> list[Req]:
        """In which order to admit the first of the queue (at most LOOK_AHEAD)."""
        return first


class Fifo(Policy):
    """First come, first served, whatever the priority."""

    name = "fifo"


class Priority(Policy):
    """Lower numbers first, as in vLLM; the longer a request waits, the lower its number counts.

    A request of priority p that came at t goes before all that come later than t + AGING_S * (difference of priority),
    so its rank is fixed: time passes for all of them alike.
    """

    name = "priority"

    def rank(self, req: Req) -> float:
        return req.priority + req.arrived_s / AGING_S


class CacheAware(Priority):
    """Of the first in line the one with the longest cached prefix, so that what is cached is used before it is evicted.

    A request that was passed over MAX_PASSED times goes first.
    """

    name = "cache_aware"
    MAX_PASSED = 32

    def order(self, first: list[Req], cached_len: CachedLen) -> list[Req]:
        return sorted(first, key=lambda req: (req.times_passed < self.MAX_PASSED, -cached_len(req)))


POLICIES = {policy.name: policy for policy in (Fifo, Priority, CacheAware)}


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ServerError(f"router_policy={name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
