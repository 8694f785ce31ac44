"""Finds the decodes of a step that begin with the same KV slots, so that attention reads those slots once.

The prefix cache gives requests with a common prefix the same first slots, so a worker only has to compare slots. Sorted
by their slots, requests that share a prefix are adjacent, and the common lengths of adjacent requests give the common
length of any two. A request that enters or leaves costs one binary search, not a comparison with every other request.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

MAX_GROUPS = 8  # per step: a captured step has room for so many
MIN_SHARED = 256  # tokens, and
MIN_MEMBERS = 4  # requests of a group: for fewer, another kernel costs about what it saves (estimated, not measured)

Key = TypeVar("Key", bound=Hashable)


class Group(NamedTuple):
    """Requests that begin with the same slots."""

    members: list[int]
    shared: int  # slots, from the first on

    @property
    def saved(self) -> int:
        """How many slots attention does not have to read."""
        return (len(self.members) - 1) * self.shared


class SharedRows(NamedTuple):
    """A group whose rows are adjacent in a step."""

    first: int
    requests: int
    shared: int  # tokens

    @property
    def saved(self) -> int:
        """How many tokens attention does not have to read."""
        return (self.requests - 1) * self.shared


class Arrangement(NamedTuple):
    order: list[int]  # indexes of the requests to arrange
    groups: list[SharedRows]  # by indexes in ``order``


class SharedPrefixes(Generic[Key]):
    """The requests of a worker whose prompts are computed, sorted by their slots."""

    def __init__(self) -> None:
        self._reqs: list[Key] = []
        self._keys: list[bytes] = []  # the slots of each, big-endian: bytes compare like the numbers
        self._common: list[int] = []  # how many slots each shares with the one before it
        self._num_common = 0  # of those that share enough
        self._last: tuple[list[Key], Arrangement] | None = None

    @property
    def may_have_groups(self) -> bool:
        """Whether enough requests share enough to form a group. It takes no time if none do."""
        return self._num_common + 1 >= MIN_MEMBERS

    def add(self, req: Key, slots: np.ndarray) -> None:
        """``slots``: int32, of all tokens that other requests may share."""
        if len(slots) < MIN_SHARED:
            return
        key = slots.astype(">i4").tobytes()
        at = bisect(self._keys, key)
        self._reqs.insert(at, req)
        self._keys.insert(at, key)
        self._common.insert(at, 0)
        self._set_common(at, self._common_before(at))
        if at + 1 < len(self._reqs):
            self._set_common(at + 1, self._common_before(at + 1))
        self._last = None

    def discard(self, req: Key) -> None:
        if req not in self._reqs:
            return
        at = self._reqs.index(req)
        del self._reqs[at], self._keys[at]
        common = self._common[at]
        self._set_common(at, 0)
        del self._common[at]
        if at < len(self._reqs):
            self._set_common(at, min(common, self._common[at]))
        self._last = None

    def arrange(self, reqs: list[Key]) -> Arrangement:
        """Put requests of a step next to each other if they share a prefix; the others follow in the given order."""
        if self._last is None or self._last[0] != reqs:
            self._last = (reqs, self._arrange(reqs))
        return self._last[1]

    def _arrange(self, reqs: list[Key]) -> Arrangement:
        places = {req: index for index, req in enumerate(reqs)}
        present: list[int] = []  # indexes of the requests, sorted by their slots
        common: list[int] = []
        least: float = 0
        for req, shared in zip(self._reqs, self._common, strict=True):
            least = min(least, shared)
            if req in places:
                present.append(places[req])
                common.append(int(least))
                least = math.inf
        return _side_by_side(len(reqs), present, best_groups(common))

    def _set_common(self, at: int, shared: int) -> None:
        self._num_common += (shared >= MIN_SHARED) - (self._common[at] >= MIN_SHARED)
        self._common[at] = shared

    def _common_before(self, at: int) -> int:
        if at == 0:
            return 0
        before, current = (np.frombuffer(key, dtype=np.int32) for key in self._keys[at - 1 : at + 1])
        length = min(len(before), len(current))
        differs = before[:length] != current[:length]
        return int(differs.argmax()) if differs.any() else length


@dataclass(slots=True)
class _Run:
    """Adjacent requests that share so many slots. The end of the run is not known yet."""

    shared: int
    first: int
    parts: list[Group] = field(default_factory=list)  # the best groups of the runs inside it, which share more

    def closed(self, end: int) -> list[Group]:
        """Its best groups: the whole run, its parts, or the better parts and one group of the other requests."""
        better = [group for group in self.parts if group.saved > len(group.members) * self.shared]
        taken = {member for group in better for member in group.members}
        others = Group([i for i in range(self.first, end) if i not in taken], self.shared)
        whole = Group(list(range(self.first, end)), self.shared)
        choices = [_best(self.parts), _best([*better, others]), _best([whole])]
        return max(choices, key=lambda groups: sum(group.saved for group in groups))


def best_groups(common: Sequence[int]) -> list[Group]:
    """The groups that save most, at most ``MAX_GROUPS``. ``common``: slots that each request shares with the previous.

    Runs of requests that share a prefix are the nodes of a tree, and the groups of a node come from its children. The
    result may not be optimal.
    """
    runs = [_Run(shared=0, first=0)]  # each inside the previous one
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
    """``groups`` have indexes into ``present``, which has indexes of ``count`` requests."""
    order: list[int] = []
    rows = []
    for members, shared in groups:
        rows.append(SharedRows(len(order), len(members), shared))
        order += [present[member] for member in members]
    grouped = set(order)
    order += [index for index in range(count) if index not in grouped]
    return Arrangement(order, rows)
