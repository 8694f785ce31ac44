"""How many replicas a load needs. Pure: the controller gives it the time.

A replica is added as soon as requests wait or KV memory runs short. One is removed only after the load has fitted into
fewer replicas for ``scale_down_s``: to start a replica costs more than to keep it.
"""

from __future__ import annotations

import math

from lightserve.ray.messages import Deployment, Load, ReplicaGroup

FULL_KV = 0.9  # above it, requests wait for memory or are preempted
TARGET_KV = 0.7


class Autoscaler:
    """Of one group of replicas."""

    def __init__(self, deployment: Deployment, group: ReplicaGroup, running: int) -> None:
        self.wanted = running
        self._fewer_since_s: float | None = None
        self.change(deployment, group)

    def change(self, deployment: Deployment, group: ReplicaGroup) -> None:
        self._deployment, self.group = deployment, group
        self.wanted = self._within_limits(self.wanted)

    def update(self, load: Load, now_s: float) -> int:
        """The number of replicas from now on."""
        needed = self._within_limits(replicas_for(load, self.wanted, self._deployment.target_queue))
        if needed >= self.wanted:
            self.wanted, self._fewer_since_s = needed, None
        elif self._fewer_since_s is None:
            self._fewer_since_s = now_s
        elif now_s - self._fewer_since_s >= self._deployment.scale_down_s:
            self.wanted, self._fewer_since_s = self.wanted - 1, None
        return self.wanted

    def _within_limits(self, count: int) -> int:
        return min(max(count, self.group.min_replicas), self.group.max_replicas)


def replicas_for(load: Load, replicas: int, target_queue: float) -> int:
    """What this load needs, if ``replicas`` carry it now."""
    if load.waiting > target_queue * replicas:
        return replicas + max(1, min(replicas, math.ceil(load.waiting / target_queue) - replicas))
    if load.kv_usage > FULL_KV:
        return replicas + 1
    if load.waiting:
        return replicas
    if not load.running:
        return 0
    return max(1, math.ceil(replicas * load.kv_usage / TARGET_KV))
