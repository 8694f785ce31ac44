"""Opens image files of clients, within limits that the header is checked against before any pixel is decoded.

Error texts are ours, because texts of Pillow may contain memory addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from lightserve.errors import InvalidRequestError
from lightserve.media.sizes import ImageHeader

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_PIXELS = 64_000_000  # 48 kB of PNG may hold 400 million
MAX_SIDE = 65_535
ORIENTATION = 0x0112  # EXIF's tag
# by the value of that tag: how the stored picture becomes the upright one
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)  # width and height change places
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I")

Pixels = npt.NDArray[np.uint8]

# Pillow refuses more than twice as many, also where it makes room for pixels while it opens a file or seeks in it.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of those between


def read_header(data: bytes) -> ImageHeader:
    """Of a file within the limits. No pixel is decoded."""
    image = open_image(data)
    width, height = image.size
    return ImageHeader(height, width) if _orientation(image) in SIDEWAYS else ImageHeader(width, height)


def decode(data: bytes) -> Image.Image:
    """The upright picture in RGB, of an animation the first one. Transparent pixels show white."""
    image = open_image(data)
    try:
        image.load()
        upright = as_rgb(image)
        turn = TURNS.get(_orientation(image))
        return upright if turn is None else upright.transpose(turn)
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, OverflowError, IndexError) as error:
        raise InvalidRequestError(f"the {image.format} image is damaged or incomplete; send it again") from error


def resized(image: Image.Image, height: int, width: int, resample: int) -> Pixels:
    """``[height, width, 3]``"""
    return np.asarray(resized_image(image, height, width, resample), dtype=np.uint8)


def resized_image(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    if image.size == (width, height):
        return image
    return image.resize((width, height), resample=Image.Resampling(resample))


def open_image(data: bytes) -> Image.Image:
    """Within the limits, and not decoded."""
    try:
        with size_explained():
            image = Image.open(BytesIO(data), formats=FORMATS)
    except InvalidRequestError:
        raise
    except Exception as error:  # whatever a parser of hostile bytes raises
        message = f"not an image of a known format ({', '.join(FORMATS)}), or its header is damaged"
        raise InvalidRequestError(message) from error
    check_size(*image.size)
    return image


@contextmanager
def size_explained() -> Iterator[None]:
    """Of a picture for which Pillow makes no room."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise InvalidRequestError(
            f"the image has more than {MAX_PIXELS:,} pixels, which is the limit; send it smaller"
        ) from error


def check_size(width: int, height: int) -> None:
    if not 0 < width <= MAX_SIDE or not 0 < height <= MAX_SIDE:
        raise InvalidRequestError(f"the image has {width} x {height} pixels; a side has 1 to {MAX_SIDE:,}")
    if width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"the image has {width * height:,} pixels ({width} x {height}); the limit is {MAX_PIXELS:,}; "
            "send it smaller"
        )


def _orientation(image: Image.Image) -> int:
    """Of the EXIF data before the pixels: to look for some behind them would decode all."""
    raw = image.info.get("exif")
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(raw)
        value: Any = exif.get(ORIENTATION, 1)
    except Exception:  # damaged metadata says nothing about the picture
        return 1
    return value if isinstance(value, int) else 1


def as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in SIXTEEN_BITS:  # Pillow would cut values off instead of scaling them
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, picture).convert("RGB")
    return image.convert("RGB")
