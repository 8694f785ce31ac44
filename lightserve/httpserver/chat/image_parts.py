"""The parts of a message that are images, in the forms of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from lightserve.media.sources import FPS_LIMITS, MAX_FRAMES, ImageSource, is_fps, video_of

IMAGE_PARTS = ("image_url", "input_image")
VIDEO_PARTS = ("video_url", "video")
DETAILS = (None, "auto", "low", "high")


def is_image(value: Any) -> bool:
    """Or a video."""
    return isinstance(value, dict) and value.get("type") in (*IMAGE_PARTS, *VIDEO_PARTS)


def image_source(value: dict[str, Any]) -> ImageSource:
    """``image_url`` is an object with a url and a detail, or the url itself."""
    if value["type"] in VIDEO_PARTS:
        return _video_source(value)
    image = value.get("image_url")
    url, detail = (image.get("url"), image.get("detail")) if isinstance(image, dict) else (image, value.get("detail"))
    if not isinstance(url, str):
        raise PydanticCustomError("image", "an image part must have an image_url with a string as url")
    if detail not in DETAILS:
        raise PydanticCustomError("image", "the detail of an image must be auto, low or high")
    return ImageSource(url, detail == "low")


def _video_source(value: dict[str, Any]) -> ImageSource:
    """``video_url`` is an object with a url, or the url itself; ``video`` is that, or a list of the urls of frames."""
    video = value.get(value["type"])
    url = video.get("url") if isinstance(video, dict) else video
    fps = value.get("fps", 2.0)
    if not is_fps(fps):
        least, most = FPS_LIMITS
        raise PydanticCustomError("video", f"the fps of a video must be a number from {least} to {most}")
    if isinstance(url, str):
        return video_of(url, float(fps))
    frames = url if value["type"] == "video" and isinstance(url, list) else []
    if 0 < len(frames) <= MAX_FRAMES and all(isinstance(frame, str) for frame in frames):
        return ImageSource("", kind="video", frames=tuple(frames), fps=float(fps))
    raise PydanticCustomError(
        "video", f"a video part must have a URL, or in video a list of 1 to {MAX_FRAMES} URLs of images"
    )
