"""Sizes and pixels that several families of models have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from lightserve.errors import InvalidRequestError, ModelFilesError, OptionError
from lightserve.media.image_file import Pixels
from lightserve.media.sizes import ImageHeader

BICUBIC = 3  # PIL.Image.Resampling
MAX_RATIO = 200  # of the longer side to the shorter one


def check_ratio(header: ImageHeader) -> None:
    """An image that is resized to a given shorter side must not become endless."""
    height, width = header.height, header.width
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels; one side is more than {MAX_RATIO} times the other; crop it"
        )


def check_max_tokens(tokens: int, max_tokens: int | None) -> None:
    """``tokens``: of the smallest image that the model reads."""
    if max_tokens is not None and max_tokens < tokens:
        raise OptionError(f"max_image_tokens={max_tokens}: an image of this model has {tokens} tokens; raise it")


def side_of(size: Any, *names: str) -> int:
    """A number of ``size`` or ``crop_size`` of preprocessor_config.json, under the first name that is there."""
    if isinstance(size, int):
        return size
    length = next((size[name] for name in names if size.get(name)), None) if isinstance(size, dict) else None
    if not isinstance(length, int):
        raise ModelFilesError(f"preprocessor_config.json: size has no {' or '.join(names)}; fetch it again")
    return length


def resampling_of(preprocessor: Any, default: int = BICUBIC) -> int:
    """How Pillow resizes."""
    resample = preprocessor.get("resample")
    return default if resample is None else int(resample)


def center(pixels: Pixels, height: int, width: int) -> Pixels:
    """The part in the middle."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def padded(pixels: Pixels, height: int, width: int) -> Pixels:
    """With black margins, so that the picture is in the middle."""
    out = np.zeros((height, width, 3), dtype=np.uint8)
    top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
    out[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return out


def tiles(pixels: Pixels, side: int) -> Iterator[Pixels]:
    """Squares, row by row."""
    for top in range(0, pixels.shape[0], side):
        for left in range(0, pixels.shape[1], side):
            yield pixels[top : top + side, left : left + side]


def padded_to_square(image: Image.Image, mean: tuple[float, ...]) -> Image.Image:
    """With margins of the mean color on the shorter sides."""
    longest = max(image.size)
    square = Image.new("RGB", (longest, longest), tuple(int(value * 255) for value in mean))
    square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    return square
