"""The parts of a message that are images, in the forms of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from lightserve.media.sources import ImageSource

IMAGE_PARTS = ("image_url", "input_image")
DETAILS = (None, "auto", "low", "high")


def is_image(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in IMAGE_PARTS


def image_source(value: dict[str, Any]) -> ImageSource:
    """``image_url`` is an object with a url and a detail, or the url itself."""
    image = value.get("image_url")
    url, detail = (image.get("url"), image.get("detail")) if isinstance(image, dict) else (image, value.get("detail"))
    if not isinstance(url, str):
        raise PydanticCustomError("image", "an image part must have an image_url with a string as url")
    if detail not in DETAILS:
        raise PydanticCustomError("image", "the detail of an image must be auto, low or high")
    return ImageSource(url, detail == "low")
