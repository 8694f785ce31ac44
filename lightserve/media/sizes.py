"""Sizes of images, in pixels and in tokens."""

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
    """What the encoder gets of an image, and the tokens that it becomes."""

    height: int  # after resizing
    width: int
    rows: int  # of tokens
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns
