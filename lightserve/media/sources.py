"""Images, videos and sounds as clients name them, and as they are once their files are read."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.media.sizes import ImageSize

FPS_LIMITS = 0.01, 1000  # of a list of frames
MAX_FRAMES = 128  # of a video, whatever the files of a model say: they are in memory at once
JPEG_URL = "data:image/jpeg;base64,"
JPEG_FRAMES_URL = "data:video/jpeg;base64,"  # vLLM's: the frames of a video, with commas between them


def is_fps(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and FPS_LIMITS[0] <= value <= FPS_LIMITS[1]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image, a video or a sound as a client names it."""

    url: str
    is_low: bool = False  # OpenAI's ``detail: low``
    param: str = "messages"  # the field of the request
    kind: str = "image"  # or video or audio: of its part in a chat template
    frames: tuple[str, ...] = ()  # URLs of the images that a video has; empty: ``url`` is all of it
    fps: float = 2.0  # of these

    @property
    def is_video(self) -> bool:
        return self.kind == "video"

    @property
    def name(self) -> str:
        """For clients."""
        return "sound" if self.kind == "audio" else self.kind

    @property
    def urls(self) -> tuple[str, ...]:
        return self.frames or (self.url,)


def video_of(url: str, fps: float) -> ImageSource:
    """``url``: of an animation, or of frames as vLLM writes them. No more of these are divided than are refused."""
    if not url.startswith(JPEG_FRAMES_URL):
        return ImageSource(url, kind="video")
    frames = url.removeprefix(JPEG_FRAMES_URL).split(",", MAX_FRAMES + 1)
    return ImageSource("", kind="video", frames=tuple(JPEG_URL + frame for frame in frames), fps=fps)


@dataclass(frozen=True, slots=True)
class ReadImage:
    digest: bytes
    size: ImageSize
    data: bytes
