"""The ids of images, and their places in prompts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightserve.errors import InvalidRequestError
from lightserve.media.sizes import ImageSize, one_grid
from lightserve.media.tokens import FIRST_ID, digest_of, expand, ids_of, locate, room_for_tokens

PAD = 7


def test_ids_are_above_every_vocabulary_and_the_same_for_equal_images() -> None:
    ids = ids_of(digest_of(b"a", "10x10"), 5000)

    assert ids.dtype == np.int32
    assert ids.min() >= FIRST_ID
    assert np.array_equal(ids_of(digest_of(b"a", "10x10"), 100), ids[:100])
    assert len(np.unique(ids)) > 4990


def test_a_digest_depends_on_every_part_and_on_where_it_ends() -> None:
    digests = {
        digest_of(b"ab", "c"),
        digest_of(b"a", "bc"),
        digest_of(b"ab", "c", ""),
        digest_of(b"ab"),
        digest_of(b""),
    }

    assert len(digests) == 5


def test_images_are_found_where_they_were_expanded() -> None:
    generator = random.Random(4)
    for _ in range(200):
        counts = [generator.randrange(1, 6) for _ in range(generator.randrange(4))]
        prompt: list[int] = []
        for _ in counts:
            prompt += [*[1] * generator.randrange(3), PAD]
        prompt += [2] * generator.randrange(3)

        ids = expand(prompt, PAD, counts)
        starts = locate([9, 9, *ids], PAD, counts)

        assert len(ids) == len(prompt) + sum(counts) - len(counts)
        assert [ids[start - 2 : start - 2 + count] for start, count in zip(starts, counts, strict=True)] == [
            [PAD] * count for count in counts
        ]


def test_a_prompt_with_more_or_fewer_placeholders_than_images_is_refused() -> None:
    for prompt, counts in (([PAD], []), ([PAD, PAD], [3]), ([1], [3])):
        with pytest.raises(InvalidRequestError, match="spell the token"):
            expand(prompt, PAD, counts)


def test_a_video_that_is_too_slow_for_the_context_is_refused() -> None:
    def slow(seconds: int) -> ImageSize:
        return ImageSize(28, 56, (2, 2), 1, 2, frames=(0, 2), times=(0, seconds))

    assert room_for_tokens(100, 50, [slow(20), one_grid(84, 84, 3, 3)]) == 100 - (20 + 1 - 4) + (3 * 3 - 3)
    assert room_for_tokens(100, 100, [slow(2)]) == 100  # fewer positions than tokens leave the limit as it is
    with pytest.raises(InvalidRequestError, match=r"50 tokens, and its videos .* 57 positions more; the limit is 99"):
        room_for_tokens(100, 50, [slow(60)])


def test_images_that_were_cut_are_not_located() -> None:
    ids = expand([1, PAD, 2, PAD], PAD, [3, 4])

    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
        locate(ids[2:], PAD, [3, 4])
    with pytest.raises(InvalidRequestError, match="spell"):
        locate([PAD, 1, PAD, PAD], PAD, [3])
