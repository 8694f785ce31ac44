"""Opens the videos of clients: animations, or lists of images that are their frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import BoundedSemaphore

import msgspec
from PIL import Image, ImageSequence

from lightserve.errors import InvalidRequestError
from lightserve.media.image_file import as_rgb, check_size, decode, open_image, read_header, size_explained
from lightserve.media.sizes import ImageHeader

MAX_FRAMES = 10_000  # of a file
MAX_PIXELS = 270_000_000  # of all frames of a request's videos: 128 of 1920 x 1080 fit
MAX_FRAME = 16_000_000  # pixels of a frame of an animation; one of 4K has 8 million
AT_ONCE = 4  # animations that a process reads: Pillow has up to four pictures of each in memory
DEFAULT_MS = 100  # of a frame without a duration, as browsers show it
FRAMES = b"\0frames\0"  # before a list of files: no file of a client begins so
FORMATS = "GIF, WebP and PNG"


_reading = BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True, slots=True)
class VideoHeader:
    size: ImageHeader
    num_frames: int
    fps: float


def pack_frames(files: Sequence[bytes]) -> bytes:
    return FRAMES + msgspec.msgpack.encode(files)


class PixelBudget:
    """How many pixels the videos of a request have: all those of an animation are decoded, for its times."""

    def __init__(self) -> None:
        self._left = MAX_PIXELS

    def spend(self, size: tuple[int, int], num_frames: int = 1) -> None:
        """Before they are decoded."""
        self.check(size, num_frames)
        self._left -= size[0] * size[1] * num_frames

    def check(self, size: tuple[int, int], num_frames: int) -> None:
        """Refuse so many frames that are still to be spent."""
        width, height = size
        if width * height * num_frames > self._left:
            raise InvalidRequestError(
                f"with {num_frames:,} frames of {width} x {height} pixels the videos of the request have more than "
                f"{MAX_PIXELS:,} pixels in all; send fewer frames or smaller ones"
            )


def read_frames(files: Sequence[bytes], fps: float, budget: PixelBudget) -> VideoHeader:
    """Of images that were taken from a video, so many of each second."""
    sizes = []
    for number, file in enumerate(files, start=1):
        with frame_named(number):
            sizes.append(read_header(file))
    if any(size != sizes[0] for size in sizes):
        raise InvalidRequestError("the frames of a video must have one size")
    budget.spend((sizes[0].width, sizes[0].height), len(sizes))
    return VideoHeader(sizes[0], len(sizes), fps)


@contextmanager
def frame_named(number: int) -> Iterator[None]:
    """In errors about it."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"its frame {number}: {error}") from error


def read_animation(data: bytes, budget: PixelBudget) -> VideoHeader:
    """The times of its frames stand between their pixels, so these are decoded."""
    image = open_image(data)
    width, height = image.size
    _check_frame(image)
    stated = None if image.format == "GIF" else getattr(image, "n_frames", 1)  # None: Pillow would look for all first
    if stated is not None:
        _check_number(stated)
        budget.check(image.size, stated)
    with _reading:
        milliseconds = [_milliseconds(frame) for frame in _frames(image, budget)]
    if stated not in (None, len(milliseconds)):
        raise InvalidRequestError(
            f"the {image.format} video has {len(milliseconds):,} frames, and its header says {stated:,}; send it again"
        )
    return VideoHeader(ImageHeader(width, height), len(milliseconds), 1000 * len(milliseconds) / sum(milliseconds))


def decode_frames(data: bytes, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """In RGB, one at a time, because a list of them may be large. ``numbers`` grow."""
    if data.startswith(FRAMES):
        files = msgspec.msgpack.decode(data[len(FRAMES) :], type=list[bytes])
        yield from (decode(files[number]) for number in numbers)
        return
    wanted = iter(numbers)
    next_wanted = next(wanted, None)
    with _reading:
        for number, frame in enumerate(_frames(open_image(data), PixelBudget())):
            if number == next_wanted:
                yield as_rgb(frame)
                next_wanted = next(wanted, None)
            if next_wanted is None:
                return
    raise InvalidRequestError(f"the video has no frame {next_wanted}: it is damaged or incomplete; send it again")


def _frames(image: Image.Image, budget: PixelBudget) -> Iterator[Image.Image]:
    """A frame of a GIF may make the whole picture larger, so the size of each is checked before it is decoded."""
    frames = iter(ImageSequence.Iterator(image))
    for number in count(1):
        with _damage_explained(image):
            frame = next(frames, None)
        if frame is None:
            return
        _check_number(number)
        _check_frame(frame)
        budget.spend(frame.size)
        with _damage_explained(image):
            frame.load()
        yield frame


def _check_frame(frame: Image.Image) -> None:
    width, height = frame.size
    check_size(width, height)
    if width * height > MAX_FRAME:
        raise InvalidRequestError(
            f"a frame of the video has {width} x {height} pixels; the limit is {MAX_FRAME:,} of an animation; send it "
            "smaller, or its frames as a list"
        )


def _check_number(num_frames: int) -> None:
    if num_frames > MAX_FRAMES:
        raise InvalidRequestError(f"the video has more than {MAX_FRAMES:,} frames; send a shorter one")


@contextmanager
def _damage_explained(image: Image.Image) -> Iterator[None]:
    try:
        with size_explained():
            yield
    except InvalidRequestError:
        raise
    except Exception as error:  # whatever a parser of hostile bytes raises
        raise InvalidRequestError(f"the {image.format} video is damaged or incomplete; send it again") from error


def _milliseconds(frame: Image.Image) -> float:
    duration = frame.info.get("duration")
    return float(duration) if isinstance(duration, int | float) and 0 < duration < 1e6 else DEFAULT_MS
