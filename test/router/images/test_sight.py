"""Prompts whose tokens see later ones."""

from __future__ import annotations

from lightserve.messages.int_arrays import int32s
from lightserve.messages.media import ImageItem, Sight
from lightserve.router.images.sight import PromptSight


def image(*spans: tuple[int, int]) -> ImageItem:
    return ImageItem(b"digest", spans, 0, 0, 32, 32, 7)


def test_no_chunk_divides_an_image_whose_tokens_see_each_other() -> None:
    boundaries = PromptSight(Sight.IMAGE).boundaries(40, [image((3, 9)), image((20, 5), (26, 5))])

    assert boundaries.longest_chunk(0, 11) == 3
    assert boundaries.longest_chunk(3, 8) == 0
    assert boundaries.shortest_chunk(3) == 9
    assert boundaries.shortest_chunk(5) == 7  # the rest of one that is cached in part
    assert boundaries.longest_chunk(12, 15) == 14  # up to the second span of the second image
    assert boundaries.longest_span == 9


def test_a_prompt_that_sees_itself_is_one_chunk_and_shares_no_prefix() -> None:
    sight = PromptSight(Sight.PROMPT)

    assert sight.boundaries(12, []).shortest_chunk(0) == 12
    assert sight.salt(int32s([1, 2, 3])) == sight.salt(int32s([1, 2, 3]))
    assert sight.salt(int32s([1, 2, 3])) != sight.salt(int32s([1, 2, 3, 4]))


def test_a_window_must_not_hide_a_prompt_that_sees_itself() -> None:
    sight = PromptSight(Sight.PROMPT, window=16)

    assert not sight.why_refused(16)
    assert "the prompt has 17 tokens; the limit is 16" in sight.why_refused(17)
    assert not PromptSight(Sight.IMAGE, window=16).why_refused(17)


def test_other_models_are_as_before() -> None:
    sight = PromptSight()

    assert not sight.boundaries(12, [image((3, 9))])
    assert not sight.salt(int32s([1, 2, 3]))
