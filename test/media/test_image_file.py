"""Files of clients: whatever they are, the answer is a picture or an InvalidRequestError."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightserve.errors import InvalidRequestError
from lightserve.media.image_file import TURNS, decode, read_header, resized
from lightserve.media.layouts.qwen import BICUBIC
from lightserve.media.sizes import ImageHeader
from test.media.corpus import gif

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
OURS = ("not an image of a known format", "is damaged or incomplete", "the image has ")


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> Image.Image:
    squares = np.random.default_rng(1).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize(size).convert(mode)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and has a few bytes of pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def read(data: bytes) -> np.ndarray | None:
    """The pixels; None: it was refused, with a text of ours."""
    message = ""
    try:
        header = read_header(data)
        image = decode(data)
    except InvalidRequestError as error:
        message = str(error)
    if message:
        assert any(text in message for text in OURS), message
        return None
    assert image.size == (header.width, header.height)
    return np.asarray(image)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_beginning_of_a_file_is_read_or_refused(kind: str) -> None:
    whole = file_of(picture(), kind)

    results = [read(whole[:length]) for length in range(len(whole))]

    assert results[0] is None
    assert results[len(whole) // 2] is None
    assert read(whole) is not None


@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bytes_end_in_a_picture_or_a_refusal(kind: str) -> None:
    seed = random.randrange(2**32)
    generator, whole = random.Random(seed), file_of(picture(), kind)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            read(bytes(data))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {data.hex()}") from error


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (65_536, 1), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_a_size_in_the_header_is_refused_before_pixels_are_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError):
        read_header(png_header(*size))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        file_of(picture(), "TIFF"),
        file_of(picture(), "BMP"),
        file_of(picture(), "ICO"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"\0\0\0\x0cjP  \r\n\x87\n",
    ],
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not an image of a known format"):
        read_header(data)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "PNG"), ("P", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("L", "JPEG"), ("P", "GIF"), ("RGB", "WEBP")],
)
def test_modes_become_the_colors_that_pillow_converts_to(mode: str, kind: str) -> None:
    data = file_of(picture(mode), kind)

    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))

    pixels = read(data)

    assert pixels is not None
    assert np.array_equal(pixels, expected)


def test_transparent_pixels_are_white() -> None:
    for mode in ("RGBA", "LA"):
        image = picture("RGB").convert(mode)
        image.putalpha(Image.new("L", image.size, 0))

        assert np.unique(np.asarray(decode(file_of(image, "PNG")))).tolist() == [255]


def test_the_upper_bits_of_sixteen_count() -> None:
    values = np.arange(24 * 16, dtype=np.uint16).reshape(16, 24) * 170
    pixels = read(file_of(Image.fromarray(values), "PNG"))

    assert pixels is not None
    assert np.array_equal(pixels[:, :, 0], values >> 8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_is_turned_as_its_exif_data_says(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(), kind, exif=exif)

    with Image.open(io.BytesIO(data)) as image:
        stored = image.convert("RGB")
    turn = TURNS.get(orientation)
    expected = stored if turn is None else stored.transpose(turn)

    assert read_header(data) == ImageHeader(*expected.size)
    assert np.array_equal(np.asarray(decode(data)), np.asarray(expected))


@pytest.mark.parametrize("size", [(65_535, 65_535), (8_001, 8_000)])
def test_a_picture_that_pillow_would_make_room_for_at_once_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="more than 64,000,000 pixels"):
        read_header(gif(size, disposal=2))


def test_the_first_picture_of_an_animation_is_read() -> None:
    first, second = picture(), picture().transpose(Image.Transpose.ROTATE_180)
    for kind in ("GIF", "WEBP", "PNG"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        data = file_of(first, kind, save_all=True, append_images=[second], **lossless)
        alone = file_of(first, kind, **lossless)

        pixels, expected = read(data), read(alone)
        assert pixels is not None
        assert expected is not None
        assert np.array_equal(pixels, expected)


def test_a_single_pixel_is_enlarged() -> None:
    data = file_of(picture(size=(1, 1)), "PNG")

    assert read_header(data) == ImageHeader(1, 1)
    assert resized(decode(data), 56, 56, BICUBIC).shape == (56, 56, 3)
