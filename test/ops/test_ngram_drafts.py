"""Drafts from earlier n-grams, against a search in Python."""

from __future__ import annotations

import random

import pytest
import torch

from lightserve.common import ops
from test.ops.cases import backends_of, device_of, ints

BACKENDS = [ops.REFERENCE, *backends_of(ops.ngram_drafts)]
WIDTH = 1500  # more than a block of the kernel
NONE = -1


def expected(text: list[int], sizes: ops.NgramSizes) -> list[int]:
    """Look at every earlier place, the last one first."""
    best, length = None, sizes.least - 1
    for end in range(len(text) - 1, 0, -1):
        same = 0
        while same < min(sizes.most, end) and text[end - 1 - same] == text[-1 - same] >= 0:
            same += 1
        if same > length:
            best, length = end, same
    if best is None:
        return [NONE] * sizes.drafts
    period = len(text) - best
    return [text[best + number % period] for number in range(sizes.drafts)]


def run(backend: str, texts: list[list[int]], begins: list[int], sizes: ops.NgramSizes) -> list[list[int]]:
    """The texts begin at these columns, and between them the table has tokens of nobody."""
    device, rng = device_of(backend), random.Random(0)
    rows = rng.sample(range(len(texts) + 2), len(texts))
    table = torch.randint(0, 3, (len(texts) + 2, WIDTH), dtype=torch.int32)
    for row, text, begin in zip(rows, texts, begins, strict=True):
        table[row, begin : begin + len(text)] = torch.tensor(text, dtype=torch.int32)
    ends = [begin + len(text) for begin, text in zip(begins, texts, strict=True)]
    of_device = ops.DraftTexts(table.to(device), *(ints(values, device) for values in (rows, begins, ends)))
    found: list[list[int]] = ops.ngram_drafts.impls[backend](of_device, (min(begins), max(ends)), sizes).tolist()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_those_of_a_search_in_python(backend: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(20):
        least = rng.randint(1, 3)
        sizes = ops.NgramSizes(least, least + rng.randrange(3), rng.randint(1, 6))
        count = rng.randint(1, 4)
        letters = rng.choice([2, 4, 30])
        lengths = [rng.choice([1, 2, 7, 40, 1200]) for _ in range(count)]
        texts = [[rng.randrange(letters) for _ in range(length)] for length in lengths]
        for text in texts:
            text[rng.randrange(len(text))] = NONE  # between a prediction and a prompt, or not sampled
        begins = [rng.randrange(WIDTH - length) for length in lengths]

        found = run(backend, texts, begins, sizes)

        assert found == [expected(text, sizes) for text in texts], f"seed {seed}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9]),
        ([5, 6, 1, 9, 5, 6, 2, 9, 5, 6], [2, 9, 5]),  # the last place
        ([4, 5, 6, 1, 9, 5, 6, 2, 4, 5, 6], [1, 9, 5]),  # more tokens before it are the same
        ([5, 6, 5, 6], [5, 6, 5]),  # the period goes on
        ([5, 6, 7, 5], [NONE] * 3),  # one token is too few
        ([5, 6, NONE, 8, 5, 6], [NONE, 8, 5]),
    ],
)
def test_drafts_follow_the_longest_and_last_match(backend: str, text: list[int], drafts: list[int]) -> None:
    assert run(backend, [text], [3], ops.NgramSizes(2, 3, 3)) == [drafts]
