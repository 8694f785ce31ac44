from __future__ import annotations

import random

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS, block_hashes


def test_two_prompts_have_the_same_hashes_as_far_as_they_are_the_same() -> None:
    choice = random.Random(1)
    for _ in range(200):
        ids = [choice.randrange(50_000) for _ in range(choice.randrange(1, 6 * BLOCK_TOKENS))]
        other = list(ids)
        changed = choice.randrange(len(ids))
        other[changed] += 1

        before, after = block_hashes(ids, "a").tolist(), block_hashes(other, "a").tolist()

        assert len(before) == len(ids) // BLOCK_TOKENS
        same = changed // BLOCK_TOKENS
        assert before[:same] == after[:same]
        assert not set(before[same:]) & set(after[same:])
        assert not set(before) & set(block_hashes(ids, "b").tolist())


def test_known_hashes_are_continued() -> None:
    ids = np.arange(5 * BLOCK_TOKENS, dtype=np.int32)
    whole = block_hashes(ids, "salt")

    for blocks in range(6):
        assert block_hashes(ids, "salt", whole[:blocks]).tolist() == whole.tolist()
