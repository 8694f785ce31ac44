"""The index against a model that holds prompts as they are."""

from __future__ import annotations

import random

from lightserve.cluster.prefix_index import PrefixIndex
from lightserve.messages.block_hash import BLOCK_TOKENS

ENGINES = 3
Prefix = tuple[int, ...]


def hashes_of(prompt: Prefix) -> list[int]:
    return [hash(prompt[:end]) for end in range(1, len(prompt) + 1)]


class CachedPrefixes:
    """What one engine has: prompts as tuples of blocks, closed under prefixes."""

    def __init__(self) -> None:
        self.epoch = 0
        self.cached: set[Prefix] = set()
        self.open: list[Prefix] = []

    def match(self, prompt: Prefix) -> int:
        known = self.cached | {one[:end] for one in self.open for end in range(1, len(one) + 1)}
        return max((end for end in range(len(prompt) + 1) if not end or prompt[:end] in known), default=0)


def test_the_index_finds_what_a_model_of_whole_prompts_finds() -> None:
    for seed in range(30):
        choice = random.Random(seed)
        index, engines = PrefixIndex(), [CachedPrefixes() for _ in range(ENGINES)]
        for number in range(ENGINES):
            index.add_engine(number)
        for _ in range(200):
            number = choice.randrange(ENGINES)
            _change(choice, index, number, engines[number])
            prompt = _prompt(choice)

            found = [index.cached_tokens(number, hashes_of(prompt)) for number in range(ENGINES)]

            assert found == [BLOCK_TOKENS * engine.match(prompt) for engine in engines]


def _prompt(choice: random.Random) -> Prefix:
    return tuple(choice.randrange(2) for _ in range(choice.randrange(6)))


def _change(choice: random.Random, index: PrefixIndex, number: int, engine: CachedPrefixes) -> None:
    """One random event: a request begins or ends, the engine caches or evicts blocks, or loses all of them."""
    kind = choice.choice(["send", "send", "end", "cache", "cache", "evict", "lose", "stale"])
    prompt = _prompt(choice)
    if kind == "send":
        engine.open.append(prompt)
        index.presume(number, hashes_of(prompt))
    elif kind == "end" and engine.open:
        ended = engine.open.pop(choice.randrange(len(engine.open)))
        index.end_presumption(number, hashes_of(ended))
    elif kind == "cache":
        engine.cached.update(prompt[:end] for end in range(1, len(prompt) + 1))
        index.update(number, engine.epoch, hashes_of(prompt), [])
    elif kind == "evict":
        evicted = {one for one in engine.cached if prompt and one[: len(prompt)] == prompt}
        engine.cached -= evicted
        index.update(number, engine.epoch, [], [hash(one) for one in evicted])
    elif kind == "lose":
        engine.cached.clear()
        engine.epoch += 1
        index.update(number, engine.epoch, [], [])
    elif kind == "stale":
        index.update(number, engine.epoch - 1, hashes_of(prompt), [])


def test_entries_of_an_engine_vanish_with_its_epoch_and_with_the_engine() -> None:
    index = PrefixIndex()
    index.add_engine(0)
    index.update(0, epoch=0, added=[1, 2, 3], evicted=[])

    index.update(0, epoch=1, added=[1], evicted=[])
    after_loss = index.cached_tokens(0, [1, 2, 3])
    index.remove_engine(0)
    index.update(0, epoch=1, added=[1, 2], evicted=[])

    assert after_loss == BLOCK_TOKENS
    assert index.cached_tokens(0, [1, 2, 3]) == 0
    index.add_engine(0)
    assert index.cached_tokens(0, [1, 2, 3]) == 0


def test_a_request_that_was_never_computed_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    index.add_engine(0)
    index.presume(0, [1, 2])
    index.presume(0, [1, 2, 3])

    index.end_presumption(0, [1, 2, 3])
    while_open = index.cached_tokens(0, [1, 2, 3])
    index.end_presumption(0, [1, 2])

    assert while_open == 2 * BLOCK_TOKENS
    assert index.num_blocks(0) == 0
