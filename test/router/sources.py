"""The sources of KV that a scheduler of a test has."""

from __future__ import annotations

from typing import TypeVar

from lightserve.router.kv.source import KvSource
from lightserve.router.scheduler import Scheduler

S = TypeVar("S", bound=KvSource)


def source_of(scheduler: Scheduler, kind: type[S]) -> S | None:
    """None: it has none of this kind."""
    return next((source for source in scheduler.only_group.sources if isinstance(source, kind)), None)
