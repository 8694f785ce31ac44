"""``image_data`` of SGLang's bodies."""

from __future__ import annotations

from typing import Any

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.fields.images import url_of
from lightserve.media.sources import ImageSource

NAME = "image_data"


def image_sources(value: Any, prompts: int, is_batch: bool) -> list[list[ImageSource]]:
    """Of each prompt. An image of all prompts is a text; an entry of a list belongs to the prompt at its place."""
    if not value:
        return [[] for _ in range(prompts)]
    if not is_batch:
        return [_sources(value)]
    entries = value if isinstance(value, list) else [value] * prompts
    if len(entries) != prompts:
        raise InvalidRequestError(f"{NAME}: {len(entries)} entries for {prompts} prompts; give one for each", NAME)
    return [_sources(entry) for entry in entries]


def _sources(value: Any) -> list[ImageSource]:
    images = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(image, str) for image in images):
        raise InvalidRequestError(f"{NAME}: an image must be a URL or base64", NAME)
    return [ImageSource(url_of(image), param=NAME) for image in images]
