"""How many replicas a load needs. Pure: the controller gives it the time.

A replica is added as soon as requests wait or KV memory runs short. One is removed only after the load has fitted into
fewer replicas for ``scale_down_s``: to start a replica costs more than to keep it.
"""

from __future__ import annotations

import math

from lightserve.ray.messages import Deployment, Load

FULL_KV = 0.9  # above it, requests wait for memory or are preempted
TARGET_KV = 0.7


class Autoscaler:
    def __init__(self, deployment: Deployment, running: int) -> None:
        self._deployment = deployment
        self.wanted = min(max(running, deployment.min_replicas), deployment.max_replicas)
        self._fewer_since_s: float | None = None

    def change(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.wanted = min(max(self.wanted, deployment.min_replicas), deployment.max_replicas)

    def update(self, load: Load, now_s: float) -> int:
        """The number of replicas from now on."""
        limits = self._deployment.min_replicas, self._deployment.max_replicas
        needed = min(max(replicas_for(load, self.wanted, self._deployment.target_queue), limits[0]), limits[1])
        if needed >= self.wanted:
            self.wanted, self._fewer_since_s = needed, None
        elif self._fewer_since_s is None:
            self._fewer_since_s = now_s
        elif now_s - self._fewer_since_s >= self._deployment.scale_down_s:
            self.wanted, self._fewer_since_s = self.wanted - 1, None
        return self.wanted


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
