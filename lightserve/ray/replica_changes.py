"""Which replicas to start and which to drain next. Pure, asked again every half second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


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


@dataclass(frozen=True, slots=True)
class GroupView:
    role: str
    wanted: int  # 0: the operator wants no such role any more
    replicas: Sequence[ReplicaView]  # from the oldest to the newest

    @property
    def missing(self) -> int:
        return max(self.wanted - sum(not one.is_draining for one in self.replicas), 0)


def group_changes(groups: Sequence[GroupView], room: int) -> dict[str, Changes]:
    """By role. ``room``: so many more replicas fit. Of all groups together, one replica is replaced at a time."""
    spare = room - sum(group.missing for group in groups)
    views = {group.role: list(group.replicas) for group in groups}
    found = {}
    for group in groups:
        own = views.pop(group.role)
        others = [one for replicas in views.values() for one in replicas]
        changes = found[group.role] = next_changes(own, group.wanted, spare > 0, others)
        spare -= max(changes.start - group.missing, 0)
        views[group.role] = [replace(one, is_draining=True) if one.replica in changes.drain else one for one in own]
        views[group.role] += [ReplicaView("", True, False, False)] * changes.start
    return found


def next_changes(
    replicas: Sequence[ReplicaView], wanted: int, has_room: bool, others: Sequence[ReplicaView] = ()
) -> Changes:
    """``replicas`` from the oldest to the newest. ``has_room``: one more fits before another one has ended.

    One replica is replaced at a time. Its successor takes requests before it is drained, if there is room for both.
    ``others``: replicas of other roles. While one of them starts or drains, none is replaced here.
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
    is_draining = any(one.is_draining for one in (*replicas, *others))
    starting = [one for one in (*active, *others) if not one.takes_requests and not one.is_draining]
    if starting:  # a second one could take the place that the first one waits for
        waiting = starting if len(active) > wanted else [one for one in starting if one in active]
        makes_room = bool(waiting) and all(one.is_stuck for one in waiting) and not is_draining
        return Changes(drain=(old[0].replica,)) if makes_room else Changes()
    if has_room and len(active) == wanted:
        return Changes(start=1)
    return Changes() if is_draining else Changes(drain=(old[0].replica,))
