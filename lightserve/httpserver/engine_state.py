"""Whether an engine takes requests."""

from __future__ import annotations

import enum


class EngineState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
