"""The radix prefix cache: which KV slots hold the tokens of which prefix, and who still reads them. No torch.

A node holds a run of tokens and their slots; the path from a root down to it spells a prefix. There is a root a salt,
and prefixes of different salts never meet. Tokens are compared by numpy, never one by one.

A node from ``match``, ``insert`` or ``extend`` is good until the next change of the cache; a locked one until it is
unlocked. A locked node keeps its end whatever happens around it: a split leaves it as the lower part, and it grows only
when the one who locked it extends it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from lightserve.common.kv.token_slots import Slots

Ids = npt.NDArray[np.int32]

# Tokens compared at first, then four times as many: an early difference costs little, a long hit few calls of numpy.
FIRST_BLOCK = 2048  # a hit of 1k: 5.0 us against 8.1 at 256 and 5.4 at 1024; misses the same; benchmark/radix_cache.py


def common_len(a: Ids, b: Ids) -> int:
    """How many tokens two runs have in common from their beginnings."""
    limit = min(len(a), len(b))
    begin, block = 0, FIRST_BLOCK
    while begin < limit:
        end = min(begin + block, limit)
        differs = a[begin:end] != b[begin:end]
        at = int(differs.argmax())
        if differs[at]:
            return begin + at
        begin, block = end, block * 4
    return limit


class RadixNode:
    """A run of tokens below another; ``end`` counts the tokens from the root to its own end. Roots hold none."""

    __slots__ = ("_room", "children", "end", "ids", "is_queued", "locks", "parent", "refs", "salt", "slots", "used_at")

    def __init__(self, parent: RadixNode | None, room: npt.NDArray[np.int32], salt: str = "") -> None:
        self.parent = parent  # None: a root, or evicted
        self.end: int = room.shape[1] + (parent.end if parent else 0)
        self.salt = salt  # of a root
        self.children: dict[int, RadixNode] = {}  # by their first token
        self.locks = 0  # on this very node
        self.refs = 0  # locks on it and on all below
        self.used_at = 0  # never before a child's
        self.is_queued = False  # for eviction; at most once
        self._keep(room, room.shape[1])

    @property
    def may_go(self) -> bool:
        """A leaf that nobody references."""
        return not self.refs and not self.children

    def path(self) -> Iterator[RadixNode]:
        """From here up to the root."""
        node: RadixNode | None = self
        while node:
            yield node
            node = node.parent

    def append(self, ids: Ids, slots: Slots) -> None:
        """Amortised O(len(ids)): room doubles."""
        old, new = len(self.ids), len(self.ids) + len(ids)
        room = self._room
        if new > room.shape[1]:
            room = np.empty((2, 2 * new), dtype=np.int32)
            room[:, :old] = self._room[:, :old]
        room[0, old:new] = ids
        room[1, old:new] = slots
        self.end += len(ids)
        self._keep(room, new)

    def pop(self, count: int) -> Slots:
        """Drop the last tokens; their slots."""
        kept = len(self.ids) - count
        popped = self.slots[kept:]
        room = self._room
        whole = room if room.base is None else cast(Slots, room.base)
        if 2 * kept < whole.shape[1]:  # a stub must not keep a long run's memory
            room = room[:, :kept].copy()
        self.end -= count
        self._keep(room, kept)
        return popped

    def split(self, count: int) -> RadixNode:
        """Give the first tokens to a new node above this one. O(count): the rest stays where it is in memory."""
        parent = cast(RadixNode, self.parent)
        upper = RadixNode(parent, self._room[:, :count].copy())
        upper.refs = self.refs
        self._keep(self._room[:, count:], len(self.ids) - count)
        parent.children[upper.ids.item(0)] = upper
        upper.children[self.ids.item(0)] = self
        self.parent = upper
        return upper

    def _keep(self, room: npt.NDArray[np.int32], count: int) -> None:
        self._room = room  # [2, capacity]: ids above slots
        self.ids: Ids = room[0, :count]
        self.slots: Slots = room[1, :count]


class RadixCache:
    """Owns the slots of the prefixes it holds. Time is a count of its calls, so the least recently used is exact."""

    def __init__(self) -> None:
        self.total_tokens = 0  # whose slots it owns
        self.referenced_tokens = 0  # of them, those on the path of a locked node
        self._roots: dict[str, RadixNode] = {}  # those with tokens or locks
        self._queue: list[tuple[int, int, RadixNode]] = []  # a heap: time it was queued with, id, node
        self._now = 0

    @property
    def evictable_tokens(self) -> int:
        return self.total_tokens - self.referenced_tokens

    def match(self, ids: Ids, salt: str = "") -> tuple[RadixNode, Slots]:
        """The longest cached prefix of ids: the node that ends there, and its slots. It counts as used now."""
        path, found = self._find(ids, salt)
        last = path[-1]
        if found < last.end:
            path[-1] = last.split(found - last.end + len(last.ids))
        self._now += 1
        for node in path:
            node.used_at = self._now
        return path[-1], np.concatenate([node.slots for node in path])

    def match_len(self, ids: Ids, salt: str = "") -> int:
        """How many tokens ``match`` would find; changes nothing."""
        return self._find(ids, salt)[1]

    def lock(self, node: RadixNode) -> None:
        """Keep the prefix that ends at node from eviction, until as many unlocks."""
        self._enter(node)
        node.locks += 1
        for part in node.path():
            if not part.refs:
                self.referenced_tokens += len(part.ids)
            part.refs += 1

    def unlock(self, node: RadixNode) -> None:
        if not node.locks:
            raise ValueError("a node of the prefix cache was unlocked more often than locked")
        node.locks -= 1
        for part in node.path():
            part.refs -= 1
            if not part.refs:
                self.referenced_tokens -= len(part.ids)
        self._settle(node)

    def extend(self, node: RadixNode, ids: Ids, slots: Slots) -> RadixNode | None:
        """Append ids right below node and own their slots; None, and nothing owned, if their first token is there.

        The caller holds one lock on node, or nobody does. If nobody else does either and node is a leaf, it grows and
        is returned itself; else a new node is. The lock stays on node: move it to keep what was appended.
        """
        _check_lengths(ids, slots)
        self._enter(node)
        if not len(ids):
            return node
        if ids.item(0) in node.children:
            return None
        self._now += 1
        for part in node.path():
            part.used_at = self._now
        return self._append(node, ids, slots, own_locks=1)

    def insert(self, ids: Ids, slots: Slots, salt: str = "") -> tuple[RadixNode, Slots]:
        """Hold ids: own the slots of what is new; the node that ends there, and slots that the caller has to free.

        Those are the given ones of the part that was cached, where they differ from the cached ones.
        """
        _check_lengths(ids, slots)
        node, cached = self.match(ids, salt)
        found = len(cached)
        duplicates = slots[:found][slots[:found] != cached]
        if found < len(ids):
            self._enter(node)
            node = self._append(node, ids[found:], slots[found:], own_locks=0)
        return node, duplicates

    def evict(self, count: int) -> Slots:
        """Drop the ``count`` least recently used tokens, or all that may go; the slots, now the caller's.

        Only from the ends of leaves that nobody references; the last leaf loses no more than is wanted.
        """
        missing = min(count, self.evictable_tokens)
        evicted = [np.empty(0, dtype=np.int32)]
        while missing > 0:
            leaf = self._pop_oldest_leaf()
            evicted.append(self._take_from(leaf, missing))
            missing -= len(evicted[-1])
        return np.concatenate(evicted)

    def drop(self, node: RadixNode) -> Slots:
        """Drop the prefix that ends at node, but for what another continues or references; the slots."""
        dropped = [np.empty(0, dtype=np.int32)]
        while node.parent is not None and node.may_go:
            parent = node.parent
            dropped.append(self._take_from(node, len(node.ids)))
            node = parent
        return np.concatenate(dropped)

    def clear(self) -> Slots:
        """Drop everything that nobody references; the slots, now the caller's."""
        return self.evict(self.evictable_tokens)

    def _find(self, ids: Ids, salt: str) -> tuple[list[RadixNode], int]:
        """The nodes along ids, root first, and how many of ids they spell: the last node perhaps only in part."""
        node = self._roots.get(salt) or RadixNode(None, np.empty((2, 0), dtype=np.int32), salt)
        path = [node]
        found = 0
        while found == node.end and found < len(ids):
            child = node.children.get(ids.item(found))
            if child is None:
                break
            found += common_len(child.ids, ids[found:])
            path.append(child)
            node = child
        return path, found

    def _append(self, node: RadixNode, ids: Ids, slots: Slots, own_locks: int) -> RadixNode:
        self.total_tokens += len(ids)
        if node.parent and not node.children and node.refs <= own_locks:
            node.append(ids, slots)
            if node.refs:
                self.referenced_tokens += len(ids)
            return node
        child = RadixNode(node, np.stack((ids, slots)))
        child.used_at = self._now
        node.children[child.ids.item(0)] = child
        self._settle(child)
        return child

    def _enter(self, node: RadixNode) -> None:
        """Know a root from its first use on, so that salts that were only looked for leave nothing behind."""
        if node.parent is None and (node.end or self._roots.setdefault(node.salt, node) is not node):
            raise ValueError("a node of the prefix cache was used after it was evicted: lock it first")

    def _settle(self, node: RadixNode) -> None:
        """Queue a node for eviction if it may go now; forget it if it is a root."""
        if not node.may_go:
            return
        if node.parent is None:
            del self._roots[node.salt]
        elif not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._queue, (node.used_at, id(node), node))

    def _pop_oldest_leaf(self) -> RadixNode:
        """Nodes stay queued when they are locked, used, dropped or given children: those are sorted out here."""
        while True:
            queued_at, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if node.parent is None:  # dropped: roots are never queued
                continue
            if queued_at == node.used_at and node.may_go:
                return node
            self._settle(node)

    def _take_from(self, leaf: RadixNode, count: int) -> Slots:
        """The slots of its last ``count`` tokens, or all it has: then it is gone."""
        if count < len(leaf.ids):
            slots = leaf.pop(count)
            self._settle(leaf)
        else:
            slots = leaf.slots
            parent = cast(RadixNode, leaf.parent)
            del parent.children[leaf.ids.item(0)]
            leaf.parent = None
            self._settle(parent)
        self.total_tokens -= len(slots)
        return slots


def _check_lengths(ids: Ids, slots: Slots) -> None:
    if len(ids) != len(slots):
        raise ValueError(f"{len(ids)} tokens with {len(slots)} KV slots")
