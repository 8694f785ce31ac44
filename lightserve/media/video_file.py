"""Opens the videos of clients: animations, or lists of images that are their frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from PIL import Image, ImageSequence

from lightserve.errors import InvalidRequestError
from lightserve.media.image_file import as_rgb, decode, open_image, read_header
from lightserve.media.sizes import ImageHeader

MAX_FRAMES = 10_000  # of a file
MAX_PIXELS = 256_000_000  # of all its frames: each is built upon the one before, so all are decoded
DEFAULT_MS = 100  # of a frame without a duration, as browsers show it
FRAMES = b"\0frames\0"  # before a list of files: no file of a client begins so
FORMATS = "GIF, WebP and PNG"


@dataclass(frozen=True, slots=True)
class VideoHeader:
    size: ImageHeader
    num_frames: int
    fps: float


def pack_frames(files: Sequence[bytes]) -> bytes:
    return FRAMES + msgspec.msgpack.encode(files)


def read_frames(files: Sequence[bytes], fps: float) -> VideoHeader:
    """Of images that were taken from a video, so many of each second."""
    sizes = [read_header(file) for file in files]
    if any(size != sizes[0] for size in sizes):
        raise InvalidRequestError("the frames of a video must have one size")
    return VideoHeader(sizes[0], len(sizes), fps)


def read_animation(data: bytes) -> VideoHeader:
    """The times of its frames stand between their pixels, so these are decoded."""
    image = open_image(data)
    with _damage_explained(image):
        count = getattr(image, "n_frames", 1)
    width, height = image.size
    if count > MAX_FRAMES or count * width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"the video has {count:,} frames of {width} x {height} pixels; the limit is {MAX_FRAMES:,} frames and "
            f"{MAX_PIXELS:,} pixels in all; send fewer or smaller ones"
        )
    milliseconds = sum(_milliseconds(frame) for frame in _frames(image))
    return VideoHeader(ImageHeader(width, height), count, 1000 * count / milliseconds)


def decode_frames(data: bytes, numbers: Sequence[int]) -> list[Image.Image]:
    """In RGB. ``numbers`` grow."""
    if data.startswith(FRAMES):
        files = msgspec.msgpack.decode(data[len(FRAMES) :], type=list[bytes])
        return [decode(files[number]) for number in numbers]
    wanted, frames = set(numbers), dict[int, Image.Image]()
    for number, frame in enumerate(_frames(open_image(data))):
        if number in wanted:
            frames[number] = as_rgb(frame)
        if number == numbers[-1]:
            break
    return [frames[number] for number in numbers]


def _frames(image: Image.Image) -> Iterator[Image.Image]:
    frames = iter(ImageSequence.Iterator(image))
    while True:
        with _damage_explained(image):
            frame = next(frames, None)
            if frame is not None:
                frame.load()
        if frame is None:
            return
        yield frame


@contextmanager
def _damage_explained(image: Image.Image) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a parser of hostile bytes raises
        raise InvalidRequestError(f"the {image.format} video is damaged or incomplete; send it again") from error


def _milliseconds(frame: Image.Image) -> float:
    duration = frame.info.get("duration")
    return float(duration) if isinstance(duration, int | float) and 0 < duration < 1e6 else DEFAULT_MS
