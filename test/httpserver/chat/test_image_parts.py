"""The forms that a part with an image may have."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from lightserve.httpserver.chat.image_parts import image_source, is_image
from lightserve.media.sources import ImageSource

URL = "https://example.com/cat.png"


@pytest.mark.parametrize(
    ("part", "is_low"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, False),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, True),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "original"}}, False),
        ({"type": "image_url", "image_url": URL}, False),
        ({"type": "input_image", "image_url": URL, "detail": "low"}, True),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, False),
        ({"type": "image", "image": URL}, False),  # of the pages of Qwen's models
        ({"type": "image", "url": URL}, False),  # of transformers
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": "1", "cache_control": {}}, False),
    ],
)
def test_every_form_names_its_url(part: dict[str, Any], is_low: bool) -> None:
    assert is_image(part)
    assert image_source(part) == ImageSource(URL, is_low)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {}}, "a string as url"),
        ({"type": "image_url"}, "a string as url"),
        ({"type": "input_image", "file_id": "1"}, "a string as url"),
        ({"type": "image", "image": ["a"]}, "a string as url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "best"}}, "auto, low, high or original"),
    ],
)
def test_a_part_without_a_url_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(PydanticCustomError, match=message):
        image_source(part)
