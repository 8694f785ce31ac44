"""Files of images that a hostile or careless client may send."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def noise(width: int = 90, height: int = 70) -> Image.Image:
    """Many bytes in every format."""
    return Image.effect_noise((width, height), 60).convert("RGB")


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Of a file without pixels."""
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def gif(*frames: tuple[int, int], disposal: int = 0) -> bytes:
    """Of a canvas of 1 x 1 pixels; each frame says that it is so large, and has the data of one pixel."""
    control = b"!\xf9\x04" + bytes([disposal << 2, 10, 0, 0, 0])
    pixel = b"\x02\x02D\x01\0"
    images = (control + b"," + struct.pack("<HHHHB", 0, 0, *size, 0) + pixel for size in frames)
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + b"".join(images) + b";"


def apng(num_frames: int) -> bytes:
    """Its header says that it has so many frames; it has one, and announces another."""
    whole = file_of(noise(), "PNG")
    pixels, end = whole.index(b"IDAT") - 4, whole.index(b"IEND") - 4
    header = png_chunk(b"acTL", struct.pack(">II", num_frames, 0))
    first, second = (
        png_chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, 90, 70, 0, 0, 1, 10, 0, 0)) for number in range(2)
    )
    return whole[:pixels] + header + first + whole[pixels:end] + second + whole[end:]


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def hostile_videos() -> Iterator[bytes]:
    """None of them is a video that can be read, though some are images."""
    yield gif((1, 1), (65_535, 65_535))  # 4 GB
    yield gif((1, 1), (9000, 9000))
    yield gif((1, 1), (9000, 8000), disposal=2)  # Pillow makes room for what is shown behind it
    yield gif((4001, 4000))
    yield gif((1, 1), *[(7000, 7000)] * 9)
    yield gif(*[(1, 1)] * 10_001)
    yield from map(apng, (2, 100, 10_001, 2**31))
    yield file_of(noise(), "PNG", save_all=True, append_images=[noise()])[:-200]


def damaged_files() -> Iterator[bytes]:
    """None of them is an image that can be read."""
    for kind in FORMATS:
        whole = file_of(noise(), kind)
        yield from (whole[: len(whole) * share // 10] for share in range(1, 9))
    for size in ((0, 5), (65_536, 1), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (5000, 20)):
        yield png_header(*size)
    yield from (b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n" * 99)
    yield from (file_of(noise(), kind) for kind in ("TIFF", "BMP", "ICO"))
    yield gif((65_535, 65_535), disposal=2)  # 4 GB
    yield file_of(noise(1000, 2), "PNG")  # one side is 500 times the other


def unusual_files() -> Iterator[bytes]:
    """All of them are read."""
    values = np.arange(24 * 16, dtype=np.uint16).reshape(16, 24) * 170
    yield file_of(Image.fromarray(values), "PNG")  # 16 bits
    yield file_of(noise().convert("CMYK"), "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6
    yield file_of(noise(), "JPEG", exif=exif)
    yield file_of(noise(), "JPEG", exif=b"Exif\0\0" + b"\xff" * 500)
    yield from (file_of(noise().resize((1, 1)), kind) for kind in FORMATS)
    yield from (file_of(noise(), kind, save_all=True, append_images=[noise()]) for kind in ("GIF", "WEBP", "PNG"))
    yield from (file_of(noise().convert(mode), "PNG") for mode in ("1", "L", "P", "LA", "RGBA"))
    yield file_of(noise(), "MPO", save_all=True, append_images=[noise(30, 20)])  # of many cameras
    yield file_of(noise(), "JPEG", progressive=True) + b"behind the end" * 99


def flipped_files() -> Iterator[bytes]:
    """Some are read, and some are not."""
    dice = random.Random(1)
    for kind in FORMATS:
        whole = file_of(noise(), kind)
        for _ in range(15):
            data = bytearray(whole)
            for _ in range(dice.randrange(1, 8)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            yield bytes(data)
