"""Truncation of a query and a document that a model reads together."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.errors import InvalidRequestError


def tokens_to_keep(texts: Sequence[int | None], limit: int) -> list[int]:
    """Positions of the tokens that stay. ``texts``: for each token, the text (0 or 1) that it belongs to.

    Tokens of neither text stay: special tokens, and the words of a prompt around both.
    """
    lengths = texts.count(0), texts.count(1)
    room = limit - (len(texts) - sum(lengths))
    if room < 2:  # one token of each
        raise InvalidRequestError(
            f"{len(texts) - sum(lengths)} tokens surround the query and the document; with a limit of {limit}, "
            "none is left for them; set a larger truncate_prompt_tokens"
        )
    left = list(longest_first(*lengths, room))
    positions = []
    for position, text in enumerate(texts):
        if text is None:
            positions.append(position)
        elif left[text] > 0:
            left[text] -= 1
            positions.append(position)
    return positions


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay if the longer one is cut first, as the tokenizers library reckons it."""
    if first > second:
        second, first = longest_first(second, first, room)
    elif first + second > room:
        first = min(first, room // 2)
        second = room - first
    return first, second
