"""Which waiting request is admitted next. A policy is a small class; --router_policy selects it by its name."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from lightserve.errors import ServerError
from lightserve.router.req import Req

AGING_S = 30.0  # waiting this long counts as much as one step of priority, so no request starves
ENTRY_POINTS = "lightserve.policies"  # of other packages
CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:Class
LOOK_AHEAD = 64  # waiting requests that a policy may reorder

CachedLen = Callable[[Req], int]  # tokens of a request's prompt that are in the prefix cache now


class Policy(ABC):
    """Places a request in the queue when it arrives, and may reorder the head of the queue before an admission."""

    name: str

    def rank(self, req: Req) -> float:
        """The lowest rank goes first; equal ranks keep the order of arrival. Computed once, on arrival."""
        return 0.0

    def order(self, first: list[Req], cached_len: CachedLen) -> list[Req]:
        """In which order to admit the head of the queue (at most LOOK_AHEAD requests)."""
        return first

    def priority(self, req: Req) -> int:
        """After admission: lower numbers get the prompt tokens of a step first, and are preempted last."""
        return 0


class Fifo(Policy):
    """First come, first served, whatever the priority."""

    name = "fifo"


class Priority(Policy):
    """Lower numbers go first, as in vLLM; a request's number counts as lower the longer it waits.

    A request of priority p that arrived at t goes before every request that arrives later than
    t + AGING_S * (difference of priority). Waiting changes all ranks alike, so a rank can be computed on arrival.
    """

    name = "priority"

    def rank(self, req: Req) -> float:
        return req.priority + req.arrived_s / AGING_S

    def priority(self, req: Req) -> int:
        return req.priority


class CacheAware(Priority):
    """The longest cached prefix goes first, so that cached tokens are used before they are evicted.

    A request that was passed over MAX_PASSED times goes first.
    """

    name = "cache_aware"
    MAX_PASSED = 32

    def order(self, first: list[Req], cached_len: CachedLen) -> list[Req]:
        return sorted(first, key=lambda req: (req.num_passed_over < self.MAX_PASSED, -cached_len(req)))


POLICIES = {policy.name: policy for policy in (Fifo, Priority, CacheAware)}


class PolicyNames(list[str]):
    """The names that --router_policy takes. A class of another package may be given as module:Class too."""

    def __init__(self) -> None:
        super().__init__([*POLICIES, *sorted(_plug_ins().keys() - POLICIES.keys())])

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and CLASS_PATH.fullmatch(name) is not None)


def make_policy(name: str) -> Policy:
    if name in POLICIES:
        return POLICIES[name]()
    path = _plug_ins().get(name, name)
    if not CLASS_PATH.fullmatch(path):
        raise ServerError(
            f"router_policy={name!r}: choose one of {', '.join(PolicyNames())}, or a class as module:Class"
        )
    return _loaded(name, path)


def _loaded(name: str, path: str) -> Policy:
    module, _, class_name = path.partition(":")
    try:
        policy = getattr(import_module(module), class_name)()
    except Exception as error:  # it is code of another package
        raise ServerError(f"router_policy={name!r}: {path} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise ServerError(f"router_policy={name!r}: {path} is no subclass of lightserve.router.policy.Policy")
    return policy


def _plug_ins() -> dict[str, str]:
    """The classes of other packages, as module:Class, by name."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
