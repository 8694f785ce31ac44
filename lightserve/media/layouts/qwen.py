"""How the models of the Qwen family read an image: its size, its tokens and its grid."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.qwen_video import QwenVideo
from lightserve.media.sizes import ImageHeader, ImageSize, PixelLimits, one_grid
from lightserve.model_files.config.images import ImageFiles

if TYPE_CHECKING:
    from PIL.Image import Image

    from lightserve.media.image_file import Pixels
    from lightserve.media.video_file import VideoHeader

BICUBIC = 3  # PIL.Image.Resampling
MAX_RATIO = 200  # of the longer side to the shorter one
LOW_DETAIL_PIXELS = 512 * 512  # OpenAI's ``detail: low``


@dataclass(frozen=True, slots=True)
class QwenImages(ImageLayout):
    """The numbers of preprocessor_config.json."""

    kinds: ClassVar[tuple[str, ...]] = ("image", "video")

    min_pixels: int
    max_pixels: int
    patch: int
    merge: int  # a token is a square of so many patches a side
    mean: tuple[float, ...]
    std: tuple[float, ...]
    video: QwenVideo | None = None  # None: of no use

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> QwenImages:
        given = files.preprocessor
        size = given.get("size") or {}
        least = given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
        most = given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
        if not least or not most:
            raise ModelFilesError("preprocessor_config.json has no min_pixels and max_pixels; fetch it again")
        patch, merge = patch_size(files), int(files.vision.get("spatial_merge_size", 2))
        if max_tokens is not None:
            most = min(most, max_tokens * (patch * merge) ** 2)
        layout = cls(int(least), int(most), patch, merge, *files.colors())
        return replace(layout, video=QwenVideo.read(files, layout.side, layout.largest.tokens))

    def video_size_of(self, video: VideoHeader, is_sampled: bool) -> ImageSize:
        assert self.video is not None
        return self.video.size_of(video, is_sampled)

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def largest(self) -> ImageSize:
        rows = self.max_pixels // self.side**2
        return one_grid(rows * self.side, self.side, rows, 1)

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        from lightserve.media.image_file import resized

        return [resized(image, height, width, BICUBIC)]

    def within(self, limits: PixelLimits) -> ImageLayout:
        """For a request that wants its images between these sizes."""
        least = self._checked("min_pixels", limits.min_pixels, self.min_pixels)
        most = self._checked("max_pixels", limits.max_pixels, self.max_pixels)
        if least > most:
            raise InvalidRequestError(
                f"mm_processor_kwargs: min_pixels {least:,} is more than max_pixels {most:,}", "mm_processor_kwargs"
            )
        return replace(self, min_pixels=least, max_pixels=most)

    def _checked(self, name: str, value: int | None, usual: int) -> int:
        if value is None:
            return usual
        if not self.min_pixels <= value <= self.max_pixels:
            raise InvalidRequestError(
                f"mm_processor_kwargs.{name} is {value:,}; it must be from {self.min_pixels:,} to "
                f"{self.max_pixels:,}, the limits of the model and of --max_image_tokens",
                "mm_processor_kwargs",
            )
        return value

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        height, width = header.height, header.width
        if max(height, width) > MAX_RATIO * min(height, width):
            raise InvalidRequestError(
                f"the image has {width} x {height} pixels; one side is more than {MAX_RATIO} times the other; crop it"
            )
        height, width = self._resized(height, width, LOW_DETAIL_PIXELS if is_low else self.max_pixels)
        return one_grid(height, width, height // self.side, width // self.side)

    def _resized(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Both sides as multiples of ``side``, with an area between the limits and nearly the same ratio."""
        side, most = self.side, max(min(most, self.max_pixels), self.min_pixels)
        rounded = round(height / side) * side, round(width / side) * side
        if rounded[0] * rounded[1] > most:
            return self._resized_to(height, width, most)
        if rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            grown = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
            if grown[0] * grown[1] <= most:  # limits of a request may be close together
                return grown
            return self._resized_to(height, width, most)
        return rounded

    def _resized_to(self, height: int, width: int, most: int) -> tuple[int, int]:
        """The shorter side is at least one token, and then the longer one has only as many as are left."""
        shrink = math.sqrt(height * width / most)
        height, width = self._floor(height / shrink), self._floor(width / shrink)
        return min(height, self._floor(most / width)), min(width, self._floor(most / height))

    def _floor(self, length: float) -> int:
        return max(self.side, math.floor(length / self.side) * self.side)


def patch_size(files: ImageFiles) -> int:
    """Pixels of a patch's side."""
    default = 14 if files.model_type in ("qwen2_vl", "qwen2_5_vl") else 16
    return int(files.vision.get("patch_size", default))
