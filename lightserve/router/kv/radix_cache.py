"""The radix prefix cache: which KV slots hold which prefix, and which prefixes requests still use. No torch.

A node holds a run of tokens and their slots; the path from a root down to it is a prefix. Every salt has its own root,
so prefixes of different salts are never shared. Runs of tokens are compared with numpy.

A node from ``match``, ``insert`` or ``extend`` is valid until the cache changes; a locked node is valid until it is
unlocked. A locked node keeps its end: a split leaves it as the lower part, and only its owner can extend it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from lightserve.router.kv.slots import Slots

Ids = npt.NDArray[np.int32]

# The first comparison covers so many tokens, each further one four times as many. So an early difference is cheap, and
# a long match takes few calls of numpy. A match of 1k tokens takes 5.0 us (8.1 us with 256, 5.4 us with 1024), and a
# miss takes the same with all three: see benchmark/engine/radix_cache.py.
FIRST_BLOCK = 2048


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


def have_common_prefix(a: Ids, b: Ids, count: int) -> bool:
    """Whether the first ``count`` tokens of two runs are the same. Most pairs differ in the last of them."""
    if min(len(a), len(b)) < count or a.item(count - 1) != b.item(count - 1):
        return False
    return common_len(a[:count], b[:count]) == count


class RadixNode:
    """A run of tokens below another; ``end`` counts the tokens from the root to its own end. Roots hold no tokens."""

    __slots__ = ("_room", "children", "end", "ids", "is_queued", "locks", "parent", "refs", "salt", "slots", "used_at")

    def __init__(self, parent: RadixNode | None, room: npt.NDArray[np.int32], salt: str = "") -> None:
        self.parent = parent  # None: a root, or evicted
        self.end: int = room.shape[1] + (parent.end if parent else 0)
        self.salt = salt  # of a root
        self.children: dict[int, RadixNode] = {}  # by first token
        self.locks = 0  # on this very node
        self.refs = 0  # locks on it and on all nodes below
        self.used_at = 0  # never earlier than a child's
        self.is_queued = False  # is in the eviction queue, at most once
        self._keep(room, room.shape[1])

    @property
    def is_evictable(self) -> bool:
        """A leaf that no request references."""
        return not self.refs and not self.children

    def path(self) -> Iterator[RadixNode]:
        """From here up to the root."""
        node: RadixNode | None = self
        while node:
            yield node
            node = node.parent

    def append(self, ids: Ids, slots: Slots) -> None:
        """Amortised O(len(ids)): the capacity doubles."""
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
        """Drop the last tokens, and return their slots."""
        remaining = len(self.ids) - count
        popped = self.slots[remaining:]
        room = self._room
        whole = room if room.base is None else cast(Slots, room.base)
        if 2 * remaining < whole.shape[1]:  # a short node must not keep a long array alive
            room = room[:, :remaining].copy()
        self.end -= count
        self._keep(room, remaining)
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
    """Owns the slots of its prefixes. Time is a count of calls, so eviction is exactly least recently used."""

    def __init__(self) -> None:
        self.total_tokens = 0  # tokens whose slots it owns
        self.referenced_tokens = 0  # so many of them are on the path of a locked node
        self._roots: dict[str, RadixNode] = {}  # roots with tokens or locks
        self._queue: list[tuple[int, int, RadixNode]] = []  # a heap of (used_at when queued, id, node)
        self._num_dropped = 0  # nodes of the queue that were dropped
        self._now = 0

    @property
    def evictable_tokens(self) -> int:
        return self.total_tokens - self.referenced_tokens

    def match(self, ids: Ids, salt: str = "") -> tuple[RadixNode, Slots]:
        """Return the node at the end of the longest cached prefix of ids, and the prefix's slots. Marks it as used."""
        path, matched = self._find(ids, salt)
        last = path[-1]
        if matched < last.end:
            path[-1] = last.split(matched - last.end + len(last.ids))
        self._now += 1
        for node in path:
            node.used_at = self._now
        return path[-1], np.concatenate([node.slots for node in path])

    def match_len(self, ids: Ids, salt: str = "") -> int:
        """How many tokens ``match`` would find. Changes nothing."""
        return self._find(ids, salt)[1]

    def find_slots(self, ids: Ids, salt: str = "") -> Slots:
        """The slots that ``match`` would return. Changes nothing."""
        path, matched = self._find(ids, salt)
        return np.concatenate([node.slots for node in path])[:matched]

    def lock(self, node: RadixNode) -> None:
        """Protect the prefix that ends at node from eviction, until ``unlock`` is called as often."""
        self._register_root(node)
        node.locks += 1
        for prefix_node in node.path():
            if not prefix_node.refs:
                self.referenced_tokens += len(prefix_node.ids)
            prefix_node.refs += 1

    def unlock(self, node: RadixNode) -> None:
        if not node.locks:
            raise ValueError("a node of the prefix cache was unlocked more often than locked")
        node.locks -= 1
        for prefix_node in node.path():
            prefix_node.refs -= 1
            if not prefix_node.refs:
                self.referenced_tokens -= len(prefix_node.ids)
        self._queue_if_evictable(node)

    def extend(self, node: RadixNode, ids: Ids, slots: Slots) -> RadixNode | None:
        """Append ids below node and own their slots. None, without owning them, if node has a child with the first id.

        Node has no lock except perhaps the caller's. A leaf without other locks grows and is returned itself; otherwise
        a new node is returned. The lock stays on node: move it to protect what was appended.
        """
        _check_lengths(ids, slots)
        self._register_root(node)
        if not len(ids):
            return node
        if ids.item(0) in node.children:
            return None
        self._now += 1
        for prefix_node in node.path():
            prefix_node.used_at = self._now
        return self._append(node, ids, slots, own_locks=1)

    def insert(self, ids: Ids, slots: Slots, salt: str = "") -> tuple[RadixNode, Slots]:
        """Add ids and own the slots of the new part. Returns the node at the end, and slots the caller has to free.

        Those are the given slots of the part that was cached, if they differ from the cached ones.
        """
        _check_lengths(ids, slots)
        node, cached = self.match(ids, salt)
        cached_len = len(cached)
        duplicates = slots[:cached_len][slots[:cached_len] != cached]
        if cached_len < len(ids):
            self._register_root(node)
            node = self._append(node, ids[cached_len:], slots[cached_len:], own_locks=0)
        return node, duplicates

    def replace(self, ids: Ids, begin: int, slots: Slots, salt: str = "") -> tuple[RadixNode, Slots] | None:
        """Like ``insert``, but tokens from ``begin`` on, where a node ends, are cached in the given slots from now on.

        Returns the node at the end, and the slots that they had, which the caller has to free. None: a prefix with
        them is locked, and nothing changes.
        """
        _check_lengths(ids, slots)
        path, _ = self._find(ids, salt)
        if any(node.refs and node.end > begin for node in path):
            return None
        node, cached = self.match(ids, salt)
        for prefix_node in node.path():
            if prefix_node.end > begin:
                prefix_node.slots[:] = slots[prefix_node.end - len(prefix_node.ids) : prefix_node.end]
        if len(cached) < len(ids):
            node = self._append(node, ids[len(cached) :], slots[len(cached) :], own_locks=0)
        return node, cached[begin:]

    def evict(self, count: int) -> Slots:
        """Drop the ``count`` least recently used tokens, or all unreferenced ones. Returns their slots to the caller.

        Tokens are dropped from the ends of unreferenced leaves. The last leaf is cut if a part is enough.
        """
        missing = min(count, self.evictable_tokens)
        evicted = [np.empty(0, dtype=np.int32)]
        while missing > 0:
            leaf = self._pop_oldest_leaf()
            evicted.append(self._drop_from(leaf, missing))
            missing -= len(evicted[-1])
        return np.concatenate(evicted)

    def drop(self, node: RadixNode) -> Slots:
        """Drop the prefix that ends at node, up to the part that others continue or reference. Returns the slots."""
        dropped = [np.empty(0, dtype=np.int32)]
        while node.parent is not None and node.is_evictable:
            parent = node.parent
            dropped.append(self._drop_from(node, len(node.ids)))
            node = parent
        return np.concatenate(dropped)

    def drop_slots(self, slots: Slots) -> Slots:
        """Drop every prefix from its first token in one of ``slots`` on. Nothing may be locked. Returns what it owned.

        It visits the whole cache.
        """
        if self.referenced_tokens:
            raise ValueError(f"{self.referenced_tokens} tokens of the prefix cache are locked: unlock them first")
        dropped = [np.empty(0, dtype=np.int32)]
        for node in self._nodes_below(*self._roots.values()):
            if node.parent is None:  # dropped with a node above it
                continue
            hits = np.flatnonzero(np.isin(node.slots, slots))
            if len(hits):
                below = self._nodes_below(node)
                dropped += [
                    self._drop_from(descendant, len(descendant.ids)) for descendant in reversed(below)
                ]  # leaves first
                dropped.append(self._drop_from(node, len(node.ids) - int(hits[0])))
        return np.concatenate(dropped)

    def _nodes_below(self, *tops: RadixNode) -> list[RadixNode]:
        """All descendants, a parent before its children."""
        descendants = [child for top in tops for child in top.children.values()]
        for node in descendants:  # the list grows
            descendants += node.children.values()
        return descendants

    def clear(self) -> Slots:
        """Drop everything that no request references. Returns the slots to the caller."""
        return self.evict(self.evictable_tokens)

    def _find(self, ids: Ids, salt: str) -> tuple[list[RadixNode], int]:
        """The nodes along ids, root first, and how many of ids they match. The last node may match in part."""
        node = self._roots.get(salt) or RadixNode(None, np.empty((2, 0), dtype=np.int32), salt)
        path = [node]
        matched = 0
        while matched == node.end and matched < len(ids):
            child = node.children.get(ids.item(matched))
            if child is None:
                break
            matched += common_len(child.ids, ids[matched:])
            path.append(child)
            node = child
        return path, matched

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
        self._queue_if_evictable(child)
        return child

    def _register_root(self, node: RadixNode) -> None:
        """Keep a root from its first use on, so that a salt that was only looked up leaves nothing behind."""
        if node.parent is None and (node.end or self._roots.setdefault(node.salt, node) is not node):
            raise ValueError("a node of the prefix cache was used after it was evicted: lock it first")

    def _queue_if_evictable(self, node: RadixNode) -> None:
        """Queue a node for eviction if it is evictable now; remove it if it is a root."""
        if not node.is_evictable:
            return
        if node.parent is None:
            del self._roots[node.salt]
        elif not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._queue, (node.used_at, id(node), node))

    def _pop_oldest_leaf(self) -> RadixNode:
        """Nodes stay queued when they are locked, used, dropped or get children. Such nodes are skipped here."""
        while True:
            queued_at, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if node.parent is None:  # dropped: roots are never queued
                self._num_dropped -= 1
                continue
            if queued_at == node.used_at and node.is_evictable:
                return node
            self._queue_if_evictable(node)

    def _drop_from(self, leaf: RadixNode, count: int) -> Slots:
        """Drop the last ``count`` tokens of a leaf, or the whole leaf, and return the slots."""
        if count < len(leaf.ids):
            slots = leaf.pop(count)
            self._queue_if_evictable(leaf)
        else:
            slots = leaf.slots
            parent = cast(RadixNode, leaf.parent)
            del parent.children[leaf.ids.item(0)]
            leaf.parent = None
            if leaf.is_queued:
                self._num_dropped += 1
                self._remove_dropped()
            self._queue_if_evictable(parent)
        self.total_tokens -= len(slots)
        return slots

    def _remove_dropped(self) -> None:
        """Rebuild the queue once most of its nodes were dropped: without evictions nobody pops them. Amortised O(1)."""
        if 2 * self._num_dropped > len(self._queue):
            self._queue = [entry for entry in self._queue if entry[2].parent is not None]
            heapq.heapify(self._queue)
            self._num_dropped = 0


def _check_lengths(ids: Ids, slots: Slots) -> None:
    if len(ids) != len(slots):
        raise ValueError(f"{len(ids)} tokens with {len(slots)} KV slots")
