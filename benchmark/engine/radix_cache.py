"""How long the radix prefix cache takes to match, insert and evict: microseconds for a thousand tokens.

    python -m benchmark.engine.radix_cache [--tokens 10000 100000 1000000]

The cache holds sequences of 100 to 12,000 tokens; most begin with one of 16 shared prefixes of 500 to 4,000 tokens.
Each column has a cache of its own size, so columns differ where time depends on how much is cached. Time is the CPU
time of this thread, the best of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightserve.router.kv.radix_cache import Ids, RadixCache, RadixNode

VOCAB = 150_000
NUM_SHARED = 16
SHARED_SHARE = 0.8
LENGTHS = np.array([100, 300, 1000, 3000, 8000])  # of what follows a shared prefix
LENGTH_WEIGHTS = np.array([0.3, 0.3, 0.25, 0.1, 0.05])
CHUNK = 512
EVICT_SHARE = 0.3  # of the cache, in each of the two ways to evict

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    us_a_thousand: float
    us_a_call: float


def cost_of(calls: list[Call], tokens: int) -> Cost:
    begin = time.thread_time_ns()
    for call in calls:
        call()
    ns = time.thread_time_ns() - begin
    return Cost(ns / tokens, ns / len(calls) / 1000)


class Load:
    """A cache filled up to a size with traffic that shares prefixes; every sequence has slots of its own."""

    def __init__(self, num_tokens: int) -> None:
        self.cache = RadixCache()
        self._rng = np.random.default_rng(num_tokens)
        self._shared = [self.ids(length) for length in self._rng.integers(500, 4000, NUM_SHARED)]
        self._sequences: list[Ids] = []
        self._next_slot = 0
        while self.cache.total_tokens < num_tokens:
            self._insert(self.sequence(int(self._rng.choice(LENGTHS, p=LENGTH_WEIGHTS))))
        self._insert(self.ids(int(LENGTHS[-1])))  # small caches have a long one too

    def ids(self, count: int) -> Ids:
        return self._rng.integers(0, VOCAB, count, dtype=np.int32)

    def slots(self, count: int) -> Ids:
        self._next_slot += count
        return np.arange(self._next_slot - count, self._next_slot, dtype=np.int32)

    def sequence(self, new_tokens: int) -> Ids:
        """As many new tokens, mostly below a shared prefix."""
        if self._rng.random() > SHARED_SHARE:
            return self.ids(new_tokens)
        return np.concatenate((self._shared[self._rng.integers(NUM_SHARED)], self.ids(new_tokens)))

    def cached(self, length: int, count: int) -> list[Ids]:
        """Beginnings of that length of cached sequences, sampled with repetition."""
        long = [ids[:length] for ids in self._sequences if len(ids) >= length]
        return [long[at] for at in self._rng.integers(len(long), size=count)]

    def _insert(self, ids: Ids) -> None:
        self._sequences.append(ids)
        self.cache.insert(ids, self.slots(len(ids)))


def match_costs(load: Load, calls: int) -> dict[str, Cost]:
    def match(prompts: list[Ids]) -> Cost:
        return cost_of([partial(load.cache.match, ids) for ids in prompts], sum(map(len, prompts)))

    thousand, eight = load.cached(1000, calls), load.cached(8000, calls)
    return {
        "match, hit of 1k, some split a node": match(thousand),
        "match, hit of 1k": match(thousand),
        "match, hit of 8k": match(eight),
        "match, miss of 1k": match([load.ids(1000) for _ in range(calls)]),
        "match_len, hit of 8k": cost_of([partial(load.cache.match_len, ids) for ids in eight], 8000 * calls),
    }


def insert_costs(load: Load, calls: int) -> dict[str, Cost]:
    def insert(prompts: list[Ids]) -> Cost:
        inserts: list[Call] = [partial(load.cache.insert, ids, load.slots(len(ids))) for ids in prompts]
        return cost_of(inserts, sum(map(len, prompts)))

    return {
        "insert, 1k new": insert([load.sequence(1000) for _ in range(calls)]),
        "insert, 8k new": insert([load.sequence(8000) for _ in range(calls // 8)]),
        "insert, 1k that are cached": insert(load.cached(1000, calls)),
    }


def extend_cost(load: Load, calls: int) -> Cost:
    """Prompts of 16 chunks, with the lock that moves along."""
    cache = load.cache

    def extend_all(node: RadixNode, chunks: list[tuple[Ids, Ids]]) -> None:
        cache.lock(node)
        for ids, slots in chunks:
            longer = cache.extend(node, ids, slots) or node
            cache.lock(longer)
            cache.unlock(node)
            node = longer
        cache.unlock(node)

    prompts: list[Call] = []
    for _ in range(calls // 16):
        chunks = [(load.ids(CHUNK), load.slots(CHUNK)) for _ in range(16)]
        prompts.append(partial(extend_all, cache.match(load.sequence(0))[0], chunks))
    cost = cost_of(prompts, len(prompts) * 16 * CHUNK)
    return Cost(cost.us_a_thousand, cost.us_a_call / 16)


def lock_cost(load: Load, calls: int) -> Cost:
    def lock_and_unlock(node: RadixNode) -> None:
        load.cache.lock(node)
        load.cache.unlock(node)

    nodes = [load.cache.match(ids)[0] for ids in load.cached(8000, calls)]
    return cost_of([partial(lock_and_unlock, node) for node in nodes], 8000 * calls)


def evict_costs(load: Load) -> dict[str, Cost]:
    def evict(count: int) -> Cost:
        calls = int(load.cache.total_tokens * EVICT_SHARE) // count
        return cost_of([partial(load.cache.evict, count)] * calls, calls * count)

    return {
        f"evict, {CHUNK} at a time": evict(CHUNK),
        "evict, 4k at a time": evict(4096),
        "clear": cost_of([load.cache.clear], load.cache.evictable_tokens),
    }


def measure(num_tokens: int, calls: int) -> dict[str, Cost]:
    load = Load(num_tokens)
    return {
        **match_costs(load, calls),
        **insert_costs(load, calls),
        f"extend, chunks of {CHUNK}, lock moved": extend_cost(load, calls),
        "lock and unlock, path of 8k": lock_cost(load, calls),
        **evict_costs(load),
    }


def best_of(repeats: int, num_tokens: int, calls: int) -> dict[str, Cost]:
    tables = [measure(num_tokens, calls) for _ in range(repeats)]
    return {name: min(table[name] for table in tables) for name in tables[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="cached")
    parser.add_argument("--calls", type=int, default=800, help="of each operation")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    columns = [best_of(args.repeats, num_tokens, args.calls) for num_tokens in args.tokens]
    print("us per thousand tokens (us per call)")
    print(f"{'cached tokens':36}" + "".join(f"{num_tokens:>18,}" for num_tokens in args.tokens))
    for name in columns[0]:
        cells = (f"{column[name].us_a_thousand:.2f} ({column[name].us_a_call:.1f})" for column in columns)
        print(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
