"""The radix prefix cache: by example, and against a dictionary that holds every cached prefix by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightserve.router.kv.radix_cache import FIRST_BLOCK, RadixCache, RadixNode
from lightserve.router.kv.slots import Slots, TokenSlots

Key = tuple[str, tuple[int, ...]]  # a salt and a prefix


def run_of(values: Sequence[int]) -> Slots:
    return np.array(values, dtype=np.int32)


def insert(cache: RadixCache, ids: Sequence[int], slots: Sequence[int], salt: str = "") -> tuple[RadixNode, list[int]]:
    node, duplicates = cache.insert(run_of(ids), run_of(slots), salt)
    return node, duplicates.tolist()


def match(cache: RadixCache, ids: Sequence[int], salt: str = "") -> tuple[RadixNode, list[int]]:
    node, slots = cache.match(run_of(ids), salt)
    return node, slots.tolist()


def locked(cache: RadixCache, ids: Sequence[int]) -> RadixNode:
    node, _ = match(cache, ids)
    cache.lock(node)
    return node


def extend(cache: RadixCache, node: RadixNode, ids: Sequence[int], slots: Sequence[int]) -> RadixNode | None:
    return cache.extend(node, run_of(ids), run_of(slots))


def moved(cache: RadixCache, node: RadixNode, ids: Sequence[int], slots: Sequence[int]) -> RadixNode:
    """Extend, and move the lock there, as a request does chunk by chunk."""
    longer = extend(cache, node, ids, slots)
    assert longer is not None
    cache.lock(longer)
    cache.unlock(node)
    return longer


def tokens(cache: RadixCache) -> tuple[int, int, int]:
    return cache.total_tokens, cache.referenced_tokens, cache.evictable_tokens


def test_an_empty_cache_matches_nothing_and_keeps_nothing() -> None:
    cache = RadixCache()

    node, slots = cache.match(run_of([1, 2]), "salt")

    assert (node.end, slots.tolist()) == (0, [])
    assert slots.dtype == np.int32
    assert cache.match_len(run_of([1, 2])) == 0
    assert cache.evict(5).tolist() == cache.clear().tolist() == []
    assert not cache._roots


def test_no_tokens_at_all_are_fine_everywhere() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])

    node, slots = match(cache, [])

    assert (node.end, slots) == (0, [])
    assert insert(cache, [], [])[1] == []
    assert extend(cache, node, [], []) is node
    assert cache.evict(0).tolist() == cache.evict(-1).tolist() == []
    assert tokens(cache) == (2, 0, 2)


def test_the_longest_cached_prefix_is_found_with_its_slots() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    insert(cache, [1, 2, 7], [10, 11, 20])

    for ids, slots in [
        ([1, 2, 3, 4], [10, 11, 12, 13]),
        ([1, 2, 3, 4, 5], [10, 11, 12, 13]),
        ([1, 2, 7, 4], [10, 11, 20]),
        ([1, 2, 8], [10, 11]),
        ([1], [10]),
        ([2, 3], []),
    ]:
        assert cache.match_len(run_of(ids)) == len(slots)
        node, found = match(cache, ids)
        assert (node.end, found) == (len(slots), slots)


LONG = 5 * FIRST_BLOCK + 100  # three blocks


@pytest.mark.parametrize("at", [0, 1, FIRST_BLOCK - 1, FIRST_BLOCK, FIRST_BLOCK + 1, 5 * FIRST_BLOCK, LONG - 1, LONG])
def test_the_first_difference_is_found_in_long_runs_too(at: int) -> None:
    cache = RadixCache()
    ids = np.arange(LONG, dtype=np.int32)
    cache.insert(ids, ids + 100_000)
    other = ids.copy()
    other[at : at + 1] = -1
    other[at + 3 :] = -2

    assert cache.match_len(other) == at
    assert cache.match(other)[1].tolist() == list(range(100_000, 100_000 + at))
    assert cache.match(ids)[1].tolist() == list(range(100_000, 100_000 + LONG))


def test_the_cache_keeps_its_own_copy_of_what_it_is_given_and_gives() -> None:
    cache = RadixCache()
    ids, slots = run_of([1, 2, 3]), run_of([10, 11, 12])
    cache.insert(ids, slots)

    ids[:] = slots[:] = 0
    cache.match(run_of([1, 2, 3]))[1][:] = 0

    assert match(cache, [1, 2, 3])[1] == [10, 11, 12]


def test_insert_gives_back_what_it_had_already() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3], [10, 11, 12])

    node, duplicates = insert(cache, [1, 2, 3, 4], [20, 21, 22, 23])

    assert (node.end, duplicates) == (4, [20, 21, 22])
    assert match(cache, [1, 2, 3, 4])[1] == [10, 11, 12, 23]


def test_replace_gives_back_the_slots_that_tokens_had_and_appends_the_others() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14])
    locked(cache, [1, 2])

    replaced = cache.replace(run_of([1, 2, 3, 4, 6]), 2, run_of([10, 11, 22, 23, 24]))

    assert replaced is not None
    assert (replaced[0].end, replaced[1].tolist()) == (5, [12, 13])
    assert match(cache, [1, 2, 3, 4, 6])[1] == [10, 11, 22, 23, 24]
    assert match(cache, [1, 2, 3, 4, 5])[1] == [10, 11, 22, 23, 14]
    assert tokens(cache) == (6, 2, 4)


def test_replace_changes_nothing_that_another_one_holds() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14])
    locked(cache, [1, 2, 3, 4])

    assert cache.replace(run_of([1, 2, 3, 6]), 2, run_of([10, 11, 22, 23])) is None

    assert match(cache, [1, 2, 3, 4, 5])[1] == [10, 11, 12, 13, 14]
    assert tokens(cache) == (5, 4, 1)


def test_insert_does_not_give_back_its_own_slots() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])
    _, shared = match(cache, [1, 2, 3])
    insert(cache, [1, 2, 3], [20, 21, 22])  # somebody else was faster with the third token

    _, duplicates = insert(cache, [1, 2, 3, 4], [*shared, 30, 31])

    assert duplicates == [30]
    assert cache.total_tokens == 4


def test_prefixes_of_different_salts_never_meet() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])

    assert cache.match_len(run_of([1, 2]), "a") == 0
    assert insert(cache, [1, 2], [20, 21], "a")[1] == []
    assert match(cache, [1, 2], "a")[1] == [20, 21]
    assert match(cache, [1, 2])[1] == [10, 11]


def test_a_salt_is_forgotten_with_its_last_token_and_lock() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11], "a")
    root, _ = match(cache, [], "a")
    cache.lock(root)

    cache.clear()
    assert list(cache._roots) == ["a"]
    cache.unlock(root)

    assert not cache._roots


def test_a_lock_references_the_path_once_however_often_it_is_held() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3], [10, 11, 12])
    insert(cache, [1, 2, 4, 5], [10, 11, 20, 21])
    three, four = locked(cache, [1, 2, 3]), locked(cache, [1, 2, 4, 5])
    locked(cache, [1, 2, 3])
    assert tokens(cache) == (5, 5, 0)

    cache.unlock(four)
    cache.unlock(three)
    assert tokens(cache) == (5, 3, 2)
    cache.unlock(three)

    assert tokens(cache) == (5, 0, 5)


def test_more_unlocks_than_locks_are_noticed() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])
    upper, _ = match(cache, [1])
    lower = locked(cache, [1, 2])

    with pytest.raises(ValueError, match="more often than locked"):
        cache.unlock(upper)  # referenced through the lower one, but not locked

    cache.unlock(lower)
    assert cache.evictable_tokens == 2


def test_a_locked_node_keeps_its_end_and_its_path_when_it_is_split() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    node = locked(cache, [1, 2, 3, 4])

    insert(cache, [1, 2, 9], [10, 11, 20])
    upper, _ = match(cache, [1])

    assert (node.end, upper.end) == (4, 1)
    assert tokens(cache) == (5, 4, 1)
    assert cache.clear().tolist() == [20]
    cache.unlock(node)
    assert sorted(cache.clear().tolist()) == [10, 11, 12, 13]


def test_a_lock_on_the_upper_part_lets_the_lower_part_go() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])
    locked(cache, [1, 2])

    assert tokens(cache) == (4, 2, 2)
    assert sorted(cache.clear().tolist()) == [12, 13]
    assert match(cache, [1, 2, 3, 4])[1] == [10, 11]


def test_a_prompt_that_comes_in_chunks_stays_one_node() -> None:
    cache = RadixCache()
    node = locked(cache, [])
    first = moved(cache, node, [0, 1, 2], [100, 101, 102])

    node = first
    for begin in range(3, 3000, 3):
        node = moved(cache, node, range(begin, begin + 3), range(100 + begin, 103 + begin))

    assert node is first
    assert node.end == 3000
    assert tokens(cache) == (3000, 3000, 0)
    assert match(cache, range(3000))[1] == list(range(100, 3100))


def test_a_leaf_that_another_one_holds_does_not_grow() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])
    mine, other = locked(cache, [1, 2]), locked(cache, [1, 2])

    longer = moved(cache, mine, [3], [12])

    assert longer is not other
    assert (other.end, longer.end) == (2, 3)
    assert moved(cache, other, [4], [13]).end == 3
    assert match(cache, [1, 2, 3])[1] == [10, 11, 12]
    assert match(cache, [1, 2, 4])[1] == [10, 11, 13]


def test_insert_does_not_grow_a_leaf_that_somebody_holds() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])
    node = locked(cache, [1, 2])

    insert(cache, [1, 2, 3], [10, 11, 12])

    assert node.end == 2
    assert tokens(cache) == (3, 2, 1)


def test_a_grown_leaf_splits_and_grows_again() -> None:
    cache = RadixCache()
    node = locked(cache, [])
    node = moved(cache, node, [1, 2], [10, 11])
    node = moved(cache, node, [3, 4], [12, 13])
    insert(cache, [1, 2, 3, 9], [10, 11, 12, 20])

    node = moved(cache, node, [5, 6, 7], [14, 15, 16])

    assert node.end == 7
    assert tokens(cache) == (8, 7, 1)
    assert match(cache, [1, 2, 3, 4, 5, 6, 7])[1] == [10, 11, 12, 13, 14, 15, 16]
    assert match(cache, [1, 2, 3, 9])[1] == [10, 11, 12, 20]


def test_extend_takes_nothing_where_another_one_was_faster() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])
    node = locked(cache, [1, 2])
    insert(cache, [1, 2, 3, 4], [10, 11, 12, 13])

    assert extend(cache, node, [3, 5], [22, 23]) is None

    assert tokens(cache) == (4, 2, 2)
    assert match(cache, [1, 2, 3, 5])[1] == [10, 11, 12]


def test_eviction_takes_the_least_recently_used_first() -> None:
    cache = RadixCache()
    for first in (1, 2, 3, 4):
        insert(cache, [first, 0], [10 * first, 10 * first + 1])
    match(cache, [1, 0])
    cache.match_len(run_of([2, 0]))  # a look is no use

    assert sorted(cache.evict(2).tolist()) == [20, 21]
    assert sorted(cache.evict(4).tolist()) == [30, 31, 40, 41]
    assert match(cache, [1, 0])[1] == [10, 11]


def test_a_match_uses_the_whole_path() -> None:
    cache = RadixCache()
    insert(cache, [1, 2], [10, 11])
    match(cache, [1])
    insert(cache, [9], [20])
    nine = locked(cache, [9])
    match(cache, [1, 2])
    assert cache.evict(1).tolist() == [11]
    cache.unlock(nine)

    assert cache.evict(1).tolist() == [20]  # used after [1] was for itself, before [1, 2] was


def test_extending_a_prefix_uses_the_whole_path() -> None:
    cache = RadixCache()
    insert(cache, [1, 3], [10, 12])
    one = locked(cache, [1])
    insert(cache, [9], [20])
    nine = locked(cache, [9])
    assert extend(cache, one, [2], [11]) is not None
    cache.unlock(one)
    assert cache.evict(2).tolist() == [12, 11]
    cache.unlock(nine)

    assert cache.evict(1).tolist() == [20]


def test_a_leaf_that_was_locked_after_it_could_go_is_spared_until_it_is_unlocked() -> None:
    cache = RadixCache()
    one, _ = insert(cache, [1], [10])
    insert(cache, [2], [20])
    cache.lock(one)

    assert cache.evict(1).tolist() == [20]
    cache.unlock(one)

    assert cache.evict(1).tolist() == [10]


def test_locks_that_come_and_go_leave_one_entry_to_evict() -> None:
    cache = RadixCache()
    node, _ = insert(cache, [1, 2], [10, 11])
    for _ in range(3):
        cache.lock(node)
        cache.unlock(node)

    assert cache.evict(9).tolist() == [10, 11]
    assert not cache._queue


def test_a_leaf_that_was_given_children_goes_after_them() -> None:
    cache = RadixCache()
    node = locked(cache, [])
    cache.unlock(moved(cache, node, [1], [10]))
    insert(cache, [1, 2], [10, 11])
    insert(cache, [1, 3], [10, 12])

    assert [cache.evict(1).tolist() for _ in range(3)] == [[11], [12], [10]]


def test_a_large_leaf_loses_only_the_end_that_is_wanted() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14])

    assert sorted(cache.evict(2).tolist()) == [13, 14]

    assert tokens(cache) == (3, 0, 3)
    assert match(cache, [1, 2, 3, 4, 5])[1] == [10, 11, 12]
    insert(cache, [1, 2, 3, 7], [10, 11, 12, 20])
    assert match(cache, [1, 2, 3, 7])[1] == [10, 11, 12, 20]
    assert [cache.evict(1).tolist() for _ in range(4)] == [[20], [12], [11], [10]]


def test_eviction_goes_up_from_the_leaves_and_stops_at_what_is_referenced() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3], [10, 11, 12])
    insert(cache, [1, 2, 4], [10, 11, 20])
    node = locked(cache, [1])

    evicted = cache.evict(100).tolist()

    assert evicted == [12, 20, 11]
    assert tokens(cache) == (1, 1, 0)
    cache.unlock(node)
    assert cache.evict(100).tolist() == [10]


def test_what_was_evicted_is_not_remembered_by_a_long_run_of_memory() -> None:
    cache = RadixCache()
    cache.insert(np.arange(1000, dtype=np.int32), np.arange(1000, dtype=np.int32))
    match(cache, [0])

    cache.evict(998)
    node, slots = match(cache, [0, 1])

    assert slots == [0, 1]
    owners = [part.ids.base for part in node.path()]
    assert sum(owner.size for owner in owners if owner is not None) < 10


def test_a_prefix_is_dropped_up_to_what_another_continues_or_references() -> None:
    cache = RadixCache()
    insert(cache, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14])
    insert(cache, [1, 2, 3, 9], [10, 11, 12, 20])
    lock = locked(cache, [1])

    assert sorted(cache.drop(match(cache, [1, 2, 3, 4, 5])[0]).tolist()) == [13, 14]
    assert sorted(cache.drop(match(cache, [1, 2, 3, 9])[0]).tolist()) == [11, 12, 20]
    assert cache.drop(match(cache, [1])[0]).tolist() == []

    cache.unlock(lock)
    insert(cache, [7, 8], [30, 31])
    assert [cache.evict(1).tolist() for _ in range(3)] == [[10], [31], [30]], "what was dropped is not evicted again"
    assert tokens(cache) == (0, 0, 0)
    assert cache.drop(match(cache, [1, 2])[0]).tolist() == []


@pytest.mark.parametrize(("num_cached", "num_dropped"), [(0, 100), (100, 100_000)])
def test_prompts_that_are_dropped_leave_nothing_in_the_queue_of_evictions(num_cached: int, num_dropped: int) -> None:
    """Without evictions nobody would pop them."""
    cache = RadixCache()
    for number in range(num_cached):
        insert(cache, [number], [number])
    longest = 0
    for number in range(num_dropped):
        node, _ = insert(cache, [number, 1], [0, 1], salt="private")
        cache.drop(node)
        longest = max(longest, len(cache._queue))

    assert longest <= 2 * num_cached + 2
    assert cache.evict(num_cached).tolist() == list(range(num_cached))


def test_an_evicted_node_is_refused() -> None:
    cache = RadixCache()
    node, _ = insert(cache, [1, 2], [10, 11])
    cache.clear()

    with pytest.raises(ValueError, match="after it was evicted"):
        cache.lock(node)
    with pytest.raises(ValueError, match="after it was evicted"):
        extend(cache, node, [3], [12])

    assert tokens(cache) == (0, 0, 0)


def test_slots_of_another_number_than_tokens_are_refused() -> None:
    cache = RadixCache()
    node = locked(cache, [])

    with pytest.raises(ValueError, match="3 tokens with 1 KV slots"):
        insert(cache, [1, 2, 3], [10])
    with pytest.raises(ValueError, match="3 tokens with 1 KV slots"):
        extend(cache, node, [1, 2, 3], [10])

    assert cache.total_tokens == 0


class PrefixDict:
    """What the cache must equal: each cached prefix with the slot of its last token and when it was last used."""

    def __init__(self) -> None:
        self.slots: dict[Key, int] = {}
        self.used_at: dict[Key, int] = {}
        self.locks: list[Key] = []
        self._now = 0

    def found(self, key: Key) -> list[Key]:
        return [prefix for prefix in prefixes(key) if prefix in self.slots]

    def use(self, keys: list[Key]) -> None:
        self._now += 1
        self.used_at.update(dict.fromkeys(keys, self._now))

    def insert(self, key: Key, slots: list[int]) -> list[int]:
        duplicates = []
        for prefix, slot in zip(prefixes(key), slots, strict=True):
            if self.slots.setdefault(prefix, slot) != slot:
                duplicates.append(slot)
        self.use(self.found(key))
        return duplicates

    def referenced(self) -> set[Key]:
        return {prefix for key in self.locks for prefix in prefixes(key)}

    def evict(self, count: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < count and (free := self.slots.keys() - self.referenced()):
            inner = {(salt, ids[:-1]) for salt, ids in self.slots}
            oldest = min(free - inner, key=lambda key: self.used_at[key])
            evicted.append(self.slots.pop(oldest))
        return evicted

    def drop(self, key: Key) -> list[int]:
        dropped: list[int] = []
        for prefix in reversed(self.found(key)):
            if prefix in self.referenced() or any((salt, ids[:-1]) == prefix for salt, ids in self.slots):
                break
            dropped.append(self.slots.pop(prefix))
        return dropped


def prefixes(key: Key) -> Iterator[Key]:
    salt, ids = key
    return ((salt, ids[:end]) for end in range(1, len(ids) + 1))


SALTS = st.sampled_from(["", "", "", "a"])
TOKENS = st.lists(st.integers(0, 1), max_size=9).map(tuple)  # two token ids: what is inserted has much in common


class AgainstPrefixDict(RuleBasedStateMachine):
    """Requests that match, lock, extend, insert and leave, on a pool that is always too small."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache()
        self.model = PrefixDict()
        self.pool = TokenSlots(40)
        self.nodes: list[RadixNode] = []  # locked; the model's locks say where they end

    def alloc(self, count: int) -> list[int] | None:
        self.evict(count - self.pool.num_free)
        return self.pool.alloc(count).tolist() if count <= self.pool.num_free else None

    def free(self, slots: list[int]) -> None:
        self.pool.free(run_of(slots))  # refuses a slot that is free

    def hold(self, node: RadixNode, key: Key) -> None:
        self.cache.lock(node)
        self.nodes.append(node)
        self.model.locks.append(key)

    @initialize(sequences=st.lists(TOKENS, min_size=2, max_size=6))
    def fill(self, sequences: list[tuple[int, ...]]) -> None:
        for ids in sequences:
            self.insert("", ids, shared=0, lock=False)

    @rule(salt=SALTS, ids=TOKENS)
    def look(self, salt: str, ids: tuple[int, ...]) -> None:
        assert self.cache.match_len(run_of(ids), salt) == len(self.model.found((salt, ids)))

    @rule(salt=SALTS, ids=TOKENS, lock=st.booleans())
    def match(self, salt: str, ids: tuple[int, ...], lock: bool) -> None:
        found = self.model.found((salt, ids))

        node, slots = match(self.cache, ids, salt)

        assert node.end == len(found)
        assert slots == [self.model.slots[key] for key in found]
        self.model.use(found)
        if lock:
            self.hold(node, (salt, ids[: len(found)]))

    @rule(salt=SALTS, ids=TOKENS, shared=st.integers(0, 10), lock=st.booleans())
    def insert(self, salt: str, ids: tuple[int, ...], shared: int, lock: bool) -> None:
        """Of a request that knew the slots of the first ``shared`` tokens, and computed the others itself."""
        own = self.alloc(len(ids))
        if own is None:
            return
        known = [self.model.slots[key] for key in self.model.found((salt, ids))[:shared]]
        slots = known + own[len(known) :]

        node, duplicates = insert(self.cache, ids, slots, salt)

        assert node.end == len(ids)
        assert duplicates == self.model.insert((salt, ids), slots)
        self.free(duplicates + own[: len(known)])
        if lock:
            self.hold(node, (salt, ids))

    @precondition(lambda self: self.nodes)
    @rule(at=st.integers(0), ids=TOKENS)
    def extend(self, at: int, ids: tuple[int, ...]) -> None:
        at %= len(self.nodes)
        node, (salt, prefix) = self.nodes[at], self.model.locks[at]
        slots = self.alloc(len(ids))
        if slots is None:
            return

        longer = extend(self.cache, node, ids, slots)

        if ids and (salt, prefix + ids[:1]) in self.model.slots:
            assert longer is None
            self.free(slots)
            return
        assert longer is not None
        self.cache.lock(longer)
        self.cache.unlock(node)
        self.nodes[at], self.model.locks[at] = longer, (salt, prefix + ids)
        if ids:
            known = [self.model.slots[key] for key in prefixes((salt, prefix))]
            assert self.model.insert((salt, prefix + ids), known + slots) == []

    @precondition(lambda self: self.nodes)
    @rule(at=st.integers(0))
    def unlock(self, at: int) -> None:
        at %= len(self.nodes)
        self.cache.unlock(self.nodes.pop(at))
        del self.model.locks[at]

    @precondition(lambda self: self.nodes)
    @rule(at=st.integers(0))
    def lock_again(self, at: int) -> None:
        at %= len(self.nodes)
        self.hold(self.nodes[at], self.model.locks[at])

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        evicted = self.cache.evict(count).tolist()
        assert sorted(evicted) == sorted(self.model.evict(count))
        self.free(evicted)

    @rule(salt=SALTS, ids=TOKENS)
    def drop(self, salt: str, ids: tuple[int, ...]) -> None:
        self.match(salt, ids, lock=False)
        node, _ = match(self.cache, ids, salt)
        self.model.use(self.model.found((salt, ids)))

        dropped = self.cache.drop(node).tolist()

        assert sorted(dropped) == sorted(self.model.drop((salt, ids)))
        self.free(dropped)

    @invariant()
    def counts_are_exact_and_no_slot_is_lost(self) -> None:
        total, referenced = len(self.model.slots), len(self.model.referenced())
        assert tokens(self.cache) == (total, referenced, total - referenced)
        assert self.pool.num_used == total
        assert len(set(self.model.slots.values())) == total

    @invariant()
    def locked_nodes_end_where_they_were_locked(self) -> None:
        assert [node.end for node in self.nodes] == [len(ids) for _, ids in self.model.locks]

    @invariant()
    def at_most_half_of_the_queue_was_dropped(self) -> None:
        num_dropped = sum(node.parent is None for _, _, node in self.cache._queue)
        assert num_dropped == self.cache._num_dropped
        assert 2 * num_dropped <= len(self.cache._queue)

    def teardown(self) -> None:
        """All that must be there is there, and all of it can go."""
        for salt, ids in list(self.model.slots):
            self.match(salt, ids, lock=False)
        for unlocked in (0, len(self.nodes)):
            for _ in range(unlocked):
                self.unlock(0)
            evicted = self.cache.clear().tolist()
            assert sorted(evicted) == sorted(self.model.evict(self.pool.size))
            self.free(evicted)
            self.counts_are_exact_and_no_slot_is_lost()
        assert self.pool.num_free == self.pool.size
        assert not self.cache._roots


TestAgainstPrefixDict = AgainstPrefixDict.TestCase
TestAgainstPrefixDict.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
