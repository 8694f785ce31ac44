"""The parts of a message that are images, videos or sounds, in the forms of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from lightserve.media.sources import FPS_LIMITS, MAX_FRAMES, ImageSource, is_fps, video_of

IMAGE_PARTS = ("image_url", "input_image", "image")
VIDEO_PARTS = ("video_url", "video")
AUDIO_PARTS = ("input_audio", "audio_url")
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")  # the file itself says which it has
DETAILS = (None, "auto", "low", "high", "original")


def is_image(value: Any) -> bool:
    """Or a video or a sound."""
    return isinstance(value, dict) and value.get("type") in (*IMAGE_PARTS, *VIDEO_PARTS, *AUDIO_PARTS)


def image_source(value: dict[str, Any]) -> ImageSource:
    """``image_url``, or ``image`` of other clients, is an object with a url and a detail, or the url itself."""
    if value["type"] in VIDEO_PARTS:
        return _video_source(value)
    if value["type"] in AUDIO_PARTS:
        return _audio_source(value)
    image = value.get("image_url") if value["type"] != "image" else value.get("image", value.get("url"))
    url, detail = (image.get("url"), image.get("detail")) if isinstance(image, dict) else (image, value.get("detail"))
    if not isinstance(url, str):
        raise PydanticCustomError("image", "an image part must have an image_url with a string as url")
    if detail not in DETAILS:
        raise PydanticCustomError("image", "the detail of an image must be auto, low, high or original")
    return ImageSource(url, detail == "low")


def _audio_source(value: dict[str, Any]) -> ImageSource:
    """``input_audio`` is an object with base64 data and a format, ``audio_url`` one with a url, or the url itself."""
    audio = value.get(value["type"])
    if value["type"] == "audio_url":
        url = audio.get("url") if isinstance(audio, dict) else audio
        if not isinstance(url, str):
            raise PydanticCustomError("audio", "an audio_url part must have an audio_url with a string as url")
        return ImageSource(url, kind="audio")
    data, form = (audio.get("data"), audio.get("format")) if isinstance(audio, dict) else (None, None)
    if not isinstance(data, str):
        raise PydanticCustomError("audio", "an input_audio part must have an input_audio with base64 as data")
    if form not in AUDIO_FORMATS:
        raise PydanticCustomError("audio", f"the format of an input_audio must be one of {', '.join(AUDIO_FORMATS)}")
    return ImageSource(f"data:;base64,{data}", kind="audio")


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
