"""Which requests of a decode step begin with the same KV slots, so that attention may read those once for all.

The prefix cache gives requests with a common prefix the same first slots, which is all that a worker need know. In
alphabetical order of their slots, those that share a prefix are neighbours, and what neighbours have in common says
what any two have. So a request that comes or leaves costs a search in the order, not a comparison with every other.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

MAX_GROUPS = 8  # a step; what a captured one has room for
MIN_SHARED = 256  # tokens, and
MIN_MEMBERS = 4  # requests of a group: for fewer, another kernel costs about what it saves (reckoned, not measured)

Key = TypeVar("Key", bound=Hashable)


class Group(NamedTuple):
    """Requests that begin with the same slots."""

    members: list[int]
    shared: int  # slots, from the first on

    @property
    def saved(self) -> int:
        """Slots that need not be read."""
        return (len(self.members) - 1) * self.shared


class SharedRows(NamedTuple):
    """A group as neighbours in a step."""

    first: int
    requests: int
    shared: int  # tokens


class Arrangement(NamedTuple):
    order: list[int]  # places in what was to be arranged
    groups: list[SharedRows]  # by places in ``order``


class SharedPrefixes(Generic[Key]):
    """The requests of a worker whose prompts are computed, in the order of their slots."""

    def __init__(self) -> None:
        self._reqs: list[Key] = []
        self._texts: list[bytes] = []  # of each its slots, such that they compare as numbers do
        self._common: list[int] = []  # slots that it shares with the one before it
        self._last: tuple[list[Key], Arrangement] | None = None

    def add(self, req: Key, slots: np.ndarray) -> None:
        """``slots`` of all its tokens that others may share, int32."""
        if len(slots) < MIN_SHARED:
            return
        text = slots.astype(">i4").tobytes()
        at = bisect(self._texts, text)
        self._reqs.insert(at, req)
        self._texts.insert(at, text)
        self._common.insert(at, self._common_before(at))
        if at + 1 < len(self._reqs):
            self._common[at + 1] = self._common_before(at + 1)
        self._last = None

    def discard(self, req: Key) -> None:
        if req not in self._reqs:
            return
        at = self._reqs.index(req)
        del self._reqs[at], self._texts[at]
        common = self._common.pop(at)
        if at < len(self._reqs):
            self._common[at] = min(common, self._common[at])
        self._last = None

    def arrange(self, reqs: list[Key]) -> Arrangement:
        """Requests of a step side by side where they share a prefix, the others behind in the order given."""
        if self._last is None or self._last[0] != reqs:
            self._last = (reqs, self._arrange(reqs))
        return self._last[1]

    def _arrange(self, reqs: list[Key]) -> Arrangement:
        places = {req: place for place, req in enumerate(reqs)}
        present: list[int] = []  # places of the requests here, in the order of their slots
        common: list[int] = []
        least: float = 0
        for req, shared in zip(self._reqs, self._common, strict=True):
            least = min(least, shared)
            if req in places:
                present.append(places[req])
                common.append(int(least))
                least = math.inf
        return _side_by_side(len(reqs), present, best_groups(common))

    def _common_before(self, at: int) -> int:
        if at == 0:
            return 0
        before, own = (np.frombuffer(text, dtype=np.int32) for text in self._texts[at - 1 : at + 1])
        length = min(len(before), len(own))
        differs = before[:length] != own[:length]
        return int(differs.argmax()) if differs.any() else length


@dataclass(slots=True)
class _Run:
    """Neighbours with so much in common, while it is not known where they end."""

    shared: int
    first: int
    parts: list[Group] = field(default_factory=list)  # the best groups of those that have more in common

    def closed(self, end: int) -> list[Group]:
        """Its best groups: all together, those of its parts, or the better ones of these and the others together."""
        better = [part for part in self.parts if part.saved > len(part.members) * self.shared]
        taken = {member for part in better for member in part.members}
        others = Group([i for i in range(self.first, end) if i not in taken], self.shared)
        whole = Group(list(range(self.first, end)), self.shared)
        choices = [_best(self.parts), _best([*better, others]), _best([whole])]
        return max(choices, key=lambda groups: sum(group.saved for group in groups))


def best_groups(common: Sequence[int]) -> list[Group]:
    """Those that save most, at most ``MAX_GROUPS``; ``common``: what each request shares with the one before it.

    Runs of neighbours that share a prefix are the nodes of a tree, and the groups of a node are made of those of its
    children. It need not be the very best of all ways to group them.
    """
    runs = [_Run(shared=0, first=0)]  # each within the one before it
    for i, between in enumerate([*common[1:], 0], start=1):
        shared = between if between >= MIN_SHARED else 0
        first, parts = i - 1, []
        while runs[-1].shared > shared:
            run = runs.pop()
            first, parts = run.first, run.closed(end=i)
            if runs[-1].shared >= shared:
                runs[-1].parts += parts
                parts = []
        if runs[-1].shared < shared:
            runs.append(_Run(shared, first, parts))
    return _best(runs[0].parts)


def _best(groups: Iterable[Group]) -> list[Group]:
    large = (group for group in groups if len(group.members) >= MIN_MEMBERS)
    return sorted(large, key=lambda group: group.saved, reverse=True)[:MAX_GROUPS]


def _side_by_side(count: int, present: Sequence[int], groups: Iterable[Group]) -> Arrangement:
    """``groups`` by places in ``present``, which has places among ``count`` requests."""
    order: list[int] = []
    rows = []
    for members, shared in groups:
        rows.append(SharedRows(len(order), len(members), shared))
        order += [present[member] for member in members]
    grouped = set(order)
    order += [place for place in range(count) if place not in grouped]
    return Arrangement(order, rows)
