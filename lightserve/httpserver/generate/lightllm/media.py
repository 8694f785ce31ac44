"""``multimodal_params`` of LightLLM's bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.fields.images import BASE64
from lightserve.media.sizes import ImageHeader
from lightserve.media.sources import ImageSource

NAME = "multimodal_params"
MAX_IMAGES = 1024  # read of a body; --limit_mm_per_prompt is lower


def image_sources(params: Mapping[str, Any] | None) -> list[ImageSource]:
    """Of a request that generates."""
    return [_source(index, entry) for index, entry in enumerate(_entries(params))]


def sources_to_count(params: Mapping[str, Any] | None) -> list[ImageSource | ImageHeader]:
    """Of /tokens: an image may be given by its size alone."""
    return [
        _header(index, entry) if entry.get("type") == "image_size" else _source(index, entry)
        for index, entry in enumerate(_entries(params))
    ]


def _entries(params: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    for kind, items in (params or {}).items():
        if items and kind != "images":
            raise NotSupportedYetError(f"`{NAME}.{kind[:100]}`", NAME)
    entries = (params or {}).get("images") or []
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise InvalidRequestError(f"{NAME}.images must be a list of objects with type and data", NAME)
    if len(entries) > MAX_IMAGES:
        raise InvalidRequestError(f"{NAME}.images: {len(entries)} images; the limit is {MAX_IMAGES}", NAME)
    return entries


def _source(index: int, entry: Mapping[str, Any]) -> ImageSource:
    kind, data = entry.get("type"), entry.get("data")
    if kind not in ("url", "base64") or not isinstance(data, str):
        raise InvalidRequestError(
            f'{NAME}.images.{index}: the type must be "url" or "base64", and data a text; '
            '"image_size" with [width, height] is for /tokens only',
            NAME,
        )
    return ImageSource(data if kind == "url" else BASE64 + data, param=NAME)


def _header(index: int, entry: Mapping[str, Any]) -> ImageHeader:
    match entry.get("data"):
        case [int(width), int(height)] if 0 < width < 2**16 and 0 < height < 2**16:
            return ImageHeader(width, height)
    raise InvalidRequestError(f"{NAME}.images.{index}: data must be [width, height] in pixels, from 1 to 65,535", NAME)
