"""Images as clients name them, and as they are once their files are read."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.media.sizes import ImageSize

FPS_LIMITS = 0.01, 1000  # of a list of frames
MAX_FRAMES = 128  # of a video, whatever the files of a model say: they are in memory at once


def is_fps(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and FPS_LIMITS[0] <= value <= FPS_LIMITS[1]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image or a video as a client names it."""

    url: str
    is_low: bool = False  # OpenAI's ``detail: low``
    param: str = "messages"  # the field of the request
    is_video: bool = False
    frames: tuple[str, ...] = ()  # URLs of the images that a video has; empty: ``url`` is all of it
    fps: float = 2.0  # of these

    @property
    def kind(self) -> str:
        """Of its part in a chat template."""
        return "video" if self.is_video else "image"

    @property
    def urls(self) -> tuple[str, ...]:
        return self.frames or (self.url,)


@dataclass(frozen=True, slots=True)
class ReadImage:
    digest: bytes
    size: ImageSize
    data: bytes
