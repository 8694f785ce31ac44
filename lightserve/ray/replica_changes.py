"""Which replicas to start and which to drain next. Pure, asked again every half second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    replica: str
    is_current: bool  # False: it must be replaced, because its flags are old or its node is drained
    takes_requests: bool
    is_draining: bool
    is_stuck: bool = False  # no node has had room for it for a while


@dataclass(frozen=True, slots=True)
class Changes:
    start: int = 0
    drain: tuple[str, ...] = ()


def next_changes(replicas: Sequence[ReplicaView], wanted: int, has_room: bool) -> Changes:
    """``replicas`` from the oldest to the newest. ``has_room``: one more fits before another one has ended.

    One replica is replaced at a time. Its successor takes requests before it is drained, if there is room for both.
    """
    active = [one for one in replicas if not one.is_draining]
    old = [one for one in active if not one.is_current]
    if len(active) < wanted:
        return Changes(start=wanted - len(active))
    if not old:
        newest_first = active[::-1]
        extra = sorted(newest_first, key=lambda one: one.takes_requests)[: len(active) - wanted]
        return Changes(drain=tuple(one.replica for one in extra))
    idle = [one for one in old if not one.takes_requests]
    if idle:  # it costs nothing to replace it
        return Changes(drain=(idle[0].replica,))
    is_draining = len(active) < len(replicas)
    starting = [one for one in active if not one.takes_requests]
    if starting:  # a second one could take the place that the first one waits for
        makes_room = any(one.is_stuck for one in starting) and not is_draining
        return Changes(drain=(old[0].replica,)) if makes_room else Changes()
    if has_room and len(active) == wanted:
        return Changes(start=1)
    return Changes() if is_draining else Changes(drain=(old[0].replica,))
