"""How a model reads images: the size of each, its tokens in a prompt, and its pixels. Each family has a layout.

A layout may read videos too, or sounds instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from lightserve.errors import InvalidRequestError
from lightserve.media.sizes import ImageHeader, ImageSize, PixelLimits
from lightserve.model_files.config.images import ImageFiles

if TYPE_CHECKING:
    from lightserve.media.audio.wav import WavHeader
    from lightserve.media.video_file import VideoHeader


class ImageLayout(ABC):
    shows_wholes_of_several: bool = False  # several images of a request have few tokens each, as with ``is_low``
    kinds: ClassVar[tuple[str, ...]] = ("image",)  # of media that the model reads
    marker: str | None = None  # what the chat template writes for an image; None: the text of its token

    @property
    @abstractmethod
    def largest(self) -> ImageSize:
        """The image with the most tokens."""

    @property
    @abstractmethod
    def patches_per_token(self) -> int:
        """What the vision tower computes for a token, for its batches."""

    @abstractmethod
    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        """``is_low``: the client wants few tokens (OpenAI's ``detail: low``)."""

    def video_size_of(self, video: VideoHeader, is_sampled: bool) -> ImageSize:
        """``is_sampled``: the client has chosen the frames; if not, some are taken."""
        raise InvalidRequestError(
            "videos are read for models of the Qwen family only; send some of its frames as images"
        )

    def sound_size_of(self, header: WavHeader) -> ImageSize:
        raise InvalidRequestError("this model reads no sounds")

    def within(self, limits: PixelLimits) -> ImageLayout:
        """For a request that wants its images between these sizes."""
        raise InvalidRequestError(
            "mm_processor_kwargs: the images of this model have no min_pixels and max_pixels; leave them out",
            "mm_processor_kwargs",
        )

    def opened(self, data: bytes, frames: Sequence[int]) -> Iterator[Any]:
        """The decoded picture of a file, or those frames of a video, for ``pixels``."""
        from lightserve.media.image_file import decode
        from lightserve.media.video_file import decode_frames

        return decode_frames(data, frames) if frames else map(decode, (data,))

    @abstractmethod
    def pixels(self, image: Any, height: int, width: int) -> list[Any]:
        """What the tower gets of an image: tiles ``[height, width, 3]``, in the order of their tokens.

        ``height`` and ``width`` are those of its ``ImageSize``.
        """

    def blank(self) -> list[Any]:
        """What the tower gets of an image of the largest size."""
        from PIL.Image import new

        height, width = self.largest.height, self.largest.width
        return self.pixels(new("RGB", (width, height)), height, width)


def read_layout(files: ImageFiles, max_tokens: int | None) -> ImageLayout:
    """``max_tokens``: of an image, at most."""
    module, _, name = files.family.layout.partition(":")
    layout: ImageLayout = getattr(import_module(module), name).read(files, max_tokens)
    return layout
