"""Asks an actor for its state without waiting for it: one call at a time, and the last answer."""

from __future__ import annotations

from typing import Any

import ray


class PolledActor:
    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.is_lost = False  # Ray says that it is dead, or cannot be reached
        self._pending: Any = None

    def poll(self) -> Any | None:
        """A new answer of its ``status``, if there is one."""
        if self._pending is None:
            self._pending = self.actor.status.remote()
        done, _ = ray.wait([self._pending], timeout=0)
        if not done:
            return None
        self._pending = None
        try:
            answer = ray.get(done[0])
        except ray.exceptions.RayError:  # Ray restarts it
            self.is_lost = True
            return None
        self.is_lost = False
        return answer
