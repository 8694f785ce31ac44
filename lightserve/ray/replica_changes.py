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
        return max(self.wanted - sum(not view.is_draining for view in self.replicas), 0)


def group_changes(groups: Sequence[GroupView], room: int) -> dict[str, Changes]:
    """By role. ``room``: so many more replicas fit. Of all groups together, one replica is replaced at a time."""
    spare = room - sum(group.missing for group in groups)
    views = {group.role: list(group.replicas) for group in groups}
    changes_by_role = {}
    for group in groups:
        group_replicas = views.pop(group.role)
        others = [view for replicas in views.values() for view in replicas]
        changes = changes_by_role[group.role] = next_changes(group_replicas, group.wanted, spare > 0, others)
        spare -= max(changes.start - group.missing, 0)
        views[group.role] = [
            replace(view, is_draining=True) if view.replica in changes.drain else view for view in group_replicas
        ]
        views[group.role] += [ReplicaView("", True, False, False)] * changes.start
    return changes_by_role


def next_changes(
    replicas: Sequence[ReplicaView], wanted: int, has_room: bool, others: Sequence[ReplicaView] = ()
) -> Changes:
    """``replicas`` from the oldest to the newest. ``has_room``: one more fits before another one has ended.

    One replica is replaced at a time. Its successor takes requests before it is drained, if there is room for both.
    ``others``: replicas of other roles. While one of them starts or drains, none is replaced here.
    """
    active = [view for view in replicas if not view.is_draining]
    old = [view for view in active if not view.is_current]
    if len(active) < wanted:
        return Changes(start=wanted - len(active))
    if not old:
        newest_first = active[::-1]
        extra = sorted(newest_first, key=lambda view: view.takes_requests)[: len(active) - wanted]
        return Changes(drain=tuple(view.replica for view in extra))
    idle = [view for view in old if not view.takes_requests]
    if idle:  # it costs nothing to replace it
        return Changes(drain=(idle[0].replica,))
    is_draining = any(view.is_draining for view in (*replicas, *others))
    starting = [view for view in (*active, *others) if not view.takes_requests and not view.is_draining]
    if starting:  # a second one could take the place that the first one waits for
        waiting = starting if len(active) > wanted else [view for view in starting if view in active]
        makes_room = bool(waiting) and all(view.is_stuck for view in waiting) and not is_draining
        return Changes(drain=(old[0].replica,)) if makes_room else Changes()
    if has_room and len(active) == wanted:
        return Changes(start=1)
    return Changes() if is_draining else Changes(drain=(old[0].replica,))
