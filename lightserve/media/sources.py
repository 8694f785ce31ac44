"""Images as clients name them, and as they are once their files are read."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.media.sizes import ImageSize


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a client names it."""

    url: str
    is_low: bool = False  # OpenAI's ``detail: low``
    param: str = "messages"  # the field of the request


@dataclass(frozen=True, slots=True)
class ReadImage:
    digest: bytes
    size: ImageSize
    data: bytes
