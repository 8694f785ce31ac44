"""Images and sounds among the tokens of a prompt: who they are, and where they stand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from lightserve.errors import InvalidRequestError
from lightserve.media.sizes import ImageSize
from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.media import ImageItem

FIRST_ID = 2**30  # above every vocabulary
ID_BYTES = 4
DIGEST_PARTS = 1  # changes with the meaning of a digest's parts


def digest_of(data: bytes, *options: str) -> bytes:
    """Of an image and everything that changes its pixels. Parts have their lengths before them."""
    digest = hashlib.sha256(bytes([DIGEST_PARTS]))
    for value in (data, *(option.encode() for option in options)):
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.digest()


def ids_of(digest: bytes, count: int) -> Int32Array:
    """The ids that stand for the tokens of an image in the prefix cache: 30 bits of its digest in each."""
    stream = hashlib.shake_128(digest).digest(count * ID_BYTES)
    return (FIRST_ID + (np.frombuffer(stream, dtype="<u4") % FIRST_ID)).astype(np.int32)


def with_image_ids(prompt_ids: Int32Array, images: Sequence[ImageItem]) -> Int32Array:
    """The prompt with ids by which the prefix cache tells images apart."""
    if not images:
        return prompt_ids
    ids = np.array(prompt_ids, dtype=np.int32)
    for image in images:
        image_ids, used = ids_of(image.digest, image.tokens), 0
        for start, count in image.spans:
            ids[start : start + count] = image_ids[used : used + count]
            used += count
    return ids


def room_for_tokens(limit: int, tokens: int, images: Iterable[ImageSize | ImageItem]) -> int:
    """How many tokens a request with these images may have: a slow video takes more rotary positions than tokens.

    ``limit``: positions, as many as tokens without images; ``tokens``: of the prompt.
    """
    extra = max(sum(_positions(image) - image.tokens for image in images), 0)
    if extra and tokens >= limit - extra:
        raise InvalidRequestError(
            f"the prompt has {tokens:,} tokens, and its videos are so slow that their times take {extra:,} positions "
            f"more; the limit is {limit - 1:,} in all (--max_req_total_len); send a shorter video, or a higher fps",
            "messages",
        )
    return limit - extra


def _positions(image: ImageSize | ImageItem) -> int:
    """From the first one of an image to that of the text behind it, if it has no text inside."""
    if not image.rows:
        return image.tokens
    if image.times:
        return max(image.times[-1] + 1, image.rows, image.columns)
    return image.tokens // (image.rows * image.columns) * max(image.rows, image.columns)


def expand(prompt_ids: Sequence[int], placeholder: int, counts: Sequence[int]) -> list[int]:
    """The prompt with as many placeholders in place of each as its run of tokens has."""
    places = [index for index, token_id in enumerate(prompt_ids) if token_id == placeholder]
    check_places(len(places), len(counts))
    ids: list[int] = []
    before = 0
    for index, count in zip(places, counts, strict=True):
        ids += prompt_ids[before:index]
        ids += [placeholder] * count
        before = index + 1
    ids += prompt_ids[before:]
    return ids


def fill_pairs(prompt_ids: Sequence[int], pair: tuple[int, int], placeholder: int) -> list[int]:
    """The prompt with a placeholder between the two ids of ``pair`` where nothing is between them."""
    ids: list[int] = []
    for token_id in prompt_ids:
        if token_id == pair[1] and ids and ids[-1] == pair[0]:
            ids.append(placeholder)
        ids.append(token_id)
    return ids


def locate(prompt_ids: Sequence[int], placeholder: int, counts: Sequence[int]) -> list[int]:
    """Where each run begins in a prompt that was expanded."""
    places = [index for index, token_id in enumerate(prompt_ids) if token_id == placeholder]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    if len(places) != sum(counts):
        raise InvalidRequestError(
            f"the prompt has {len(places)} of the {sum(counts)} tokens of its images: the text must not spell their "
            "token, and truncate_prompt_tokens must not cut them",
            "messages",
        )
    starts = [places[first] for first in firsts]
    ends = [places[first + count - 1] + 1 for first, count in zip(firsts, counts, strict=True)]
    if any(end - start != count for start, end, count in zip(starts, ends, counts, strict=True)):
        raise InvalidRequestError("the text must not spell the token that stands for an image", "messages")
    return starts


def check_places(places: int, images: int) -> None:
    """``images``: or runs of their tokens."""
    if places != images:
        raise InvalidRequestError(
            f"the prompt has {places} places for {images} images or sounds: the text must not spell the token that "
            "stands for one, and the chat template must show each of them",
            "messages",
        )


def check_kind(is_video: bool, is_wanted: bool) -> None:
    """Of what a prompt has at a place, and of what the request has for it."""
    if is_video != is_wanted:
        raise InvalidRequestError(
            "the prompt has an image in the place of a video, or a video in that of an image: the text must not spell "
            "their tokens, and the chat template must show each of them",
            "messages",
        )
