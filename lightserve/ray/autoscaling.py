"""How many replicas a load needs. Pure: the controller gives it the time.

A replica is added as soon as requests wait or KV memory runs short. If it is KV memory, the next one is added only when
all of them serve and their KV has been measured again: a replica takes minutes to start. One is removed only after the
load has fitted into fewer replicas for ``scale_down_s``: to start a replica costs more than to keep it.

Prefill replicas have other rules. Their KV memory says nothing, because prompts leave it at once. Their queues stay
short, because decode replicas compute prompts themselves: if these do it all the time, there are too few prefill
replicas.
"""

from __future__ import annotations

import math

from lightserve.ray.messages import Deployment, Load, ReplicaGroup

FULL_KV = 0.9  # above it, requests wait for memory or are preempted
TARGET_KV = 0.7
SETTLE_S = 10.0  # after a replica has begun to serve: requests move to it, and metrics show that
OVERLOAD_S = 10.0  # that prefill replicas must be overloaded before one is added: bursts are what they are for


class Autoscaler:
    """Of one group of replicas."""

    def __init__(self, deployment: Deployment, group: ReplicaGroup, running: int) -> None:
        self.wanted = running
        self._fewer_since_s: float | None = None
        self._overload = PrefillOverload()
        self._serving: int | None = None  # replicas at the last update
        self._changed_s = float("-inf")  # when their number changed
        self.change(deployment, group)

    def change(self, deployment: Deployment, group: ReplicaGroup) -> None:
        self._deployment, self.group = deployment, group
        self.wanted = self._within_limits(self.wanted)

    def update(self, load: Load, now_s: float, serving: int | None = None) -> int:
        """The number of replicas from now on. ``serving``: so many carry the load; None: all that are wanted."""
        if self._serving is not None and serving != self._serving:
            self._changed_s = now_s
        self._serving = serving
        needed = self._within_limits(self._needed(load, now_s))
        if needed >= self.wanted:
            self.wanted, self._fewer_since_s = needed, None
        elif self._fewer_since_s is None:
            self._fewer_since_s = now_s
        elif now_s - self._fewer_since_s >= self._deployment.scale_down_s:
            self.wanted, self._fewer_since_s = self.wanted - 1, None
        return self.wanted

    def _needed(self, load: Load, now_s: float) -> int:
        target_queue = self._deployment.target_queue
        if self.group.role != "prefill":
            needed = replicas_for(load, self.wanted, target_queue)
            is_of_kv = load.kv_usage > FULL_KV and needed == self.wanted + 1
            return self.wanted if is_of_kv and self._is_changing(now_s) else needed
        needed = prefill_replicas_for(load, self.wanted, target_queue)
        if self._overload.lasts(load.local_prefill_tokens, now_s):
            return max(needed, self.wanted + 1)
        return max(needed, self.wanted) if self._overload.is_seen else needed

    def _is_changing(self, now_s: float) -> bool:
        """Whether a replica starts, or has started so late that its share of the load is not measured."""
        is_starting = self._serving is not None and self._serving < self.wanted
        return is_starting or now_s - self._changed_s < SETTLE_S

    def _within_limits(self, count: int) -> int:
        return min(max(count, self.group.min_replicas), self.group.max_replicas)


class PrefillOverload:
    """Whether decode replicas keep computing prompts that prefill replicas should compute."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._since_s: float | None = None
        self._last_s = 0.0

    @property
    def is_seen(self) -> bool:
        return self._since_s is not None

    def lasts(self, tokens: float, now_s: float) -> bool:
        """True if it has lasted for OVERLOAD_S, and then again only after as long. ``tokens``: a counter."""
        grows = self._tokens is not None and tokens > self._tokens
        self._tokens = tokens
        if not grows:
            if now_s - self._last_s > OVERLOAD_S:
                self._since_s = None
            return False
        self._last_s = now_s
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < OVERLOAD_S:
            return False
        self._since_s = now_s
        return True


def prefill_replicas_for(load: Load, replicas: int, target_queue: float) -> int:
    """As many as there are prompts at the same time; more, if too many of these wait."""
    if load.waiting > target_queue * replicas:
        return _more(load, replicas, target_queue)
    return min(replicas, math.ceil(load.running + load.waiting))


def _more(load: Load, replicas: int, target_queue: float) -> int:
    return replicas + max(1, min(replicas, math.ceil(load.waiting / target_queue) - replicas))


def replicas_for(load: Load, replicas: int, target_queue: float) -> int:
    """What this load needs, if ``replicas`` carry it now."""
    if load.waiting > target_queue * replicas:
        return _more(load, replicas, target_queue)
    if load.kv_usage > FULL_KV:
        return replicas + 1
    if load.waiting:
        return replicas
    if not load.running:
        return 0
    return max(1, math.ceil(replicas * load.kv_usage / TARGET_KV))
