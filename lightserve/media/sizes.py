"""Sizes of images, in pixels and in tokens, and of sounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageHeader:
    width: int  # of the upright picture
    height: int


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """What a request wants of its images; None: as the model."""

    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def is_empty(self) -> bool:
        return self.min_pixels is None and self.max_pixels is None


NO_LIMITS = PixelLimits()


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What the encoder gets of an image, and what stands for it in a prompt: runs of tokens, and texts around them."""

    height: int  # after resizing; of a sound the frames of its features
    width: int  # of a sound the numbers of such a frame
    runs: tuple[int, ...]  # how many tokens with an embedding follow one another, of each run
    rows: int = 0  # of a run's tokens, if they have rotary positions of three axes; 0: they have positions as text has
    columns: int = 0
    # before, between and behind the runs, or before each of a video's; empty: none
    texts: tuple[str, ...] = ()
    frames: tuple[int, ...] = ()  # numbers of those of a video; empty: it is an image
    # how far the rotary positions of each run on the axis of time lie behind those of the first; empty: each run has
    # positions behind those of the run before
    times: tuple[int, ...] = ()
    seconds: float = 0.0  # of a sound; 0: it is none

    @property
    def tokens(self) -> int:
        """Those with an embedding."""
        return sum(self.runs)


def one_grid(height: int, width: int, rows: int, columns: int) -> ImageSize:
    """An image that is one run of tokens, with rotary positions of three axes."""
    return ImageSize(height, width, (rows * columns,), rows, columns)
