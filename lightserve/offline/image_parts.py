"""Images and sounds as callers of LLM give them: PIL.Image, bytes, a path, a URL, or a part of a message with one."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightserve.errors import InvalidRequestError
from lightserve.media.sources import FPS_LIMITS, ImageSource, is_fps, video_of

# by the type of a part: the field with the image; vLLM's and transformers' names
FIELDS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image_pil": ("image_pil",),
    "image": ("image", "url", "path"),
    "video_url": ("video_url",),
    "video": ("video", "url", "path"),
    "input_audio": ("input_audio",),
    "audio_url": ("audio_url",),
    "audio": ("audio", "url", "path"),
}
VIDEOS = ("video_url", "video")
SOUNDS = ("input_audio", "audio_url", "audio")
PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


class Video(NamedTuple):
    content: Any  # the images that are its frames, or an animation in the forms of an image
    fps: float  # of these frames


class Sound(NamedTuple):
    content: Any  # a WAV file in the forms of an image


def is_image_part(value: Any) -> bool:
    """Or a video or a sound."""
    return isinstance(value, Mapping) and value.get("type") in FIELDS


def image_of_part(value: Mapping[str, Any]) -> Any:
    names = FIELDS[value["type"]]
    image = next((value[name] for name in names if value.get(name) is not None), None)
    if isinstance(image, Mapping):
        data = image.get("data")  # OpenAI's, in base64
        image = f"data:;base64,{data}" if isinstance(data, str) else image.get("url")
    if image is None:
        raise InvalidRequestError(f"a part of type {value['type']!r} needs its content in {' or '.join(names)}")
    if value["type"] in SOUNDS:
        return Sound(image)
    return Video(image, _fps_of(value)) if value["type"] in VIDEOS else image


def _fps_of(value: Mapping[str, Any]) -> float:
    fps = value.get("fps", 2.0)
    if not is_fps(fps):
        least, most = FPS_LIMITS
        raise InvalidRequestError(f"the fps of a video is {str(fps)[:20]}; it must be a number from {least} to {most}")
    return float(fps)


def for_template(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages with plain parts in place of images, and the images."""
    images: list[Any] = []
    rendered: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(map(is_image_part, content)):
            images += [image_of_part(each) for each in content if is_image_part(each)]
            content = [_plain(each) if is_image_part(each) else each for each in content]
        rendered.append({**message, "content": content})
    return (rendered, images) if images else (list(map(dict, messages)), [])


def _plain(medium: Mapping[str, Any]) -> dict[str, str]:
    """The part for the chat template."""
    kind = medium["type"]
    return {"type": "video" if kind in VIDEOS else "audio" if kind in SOUNDS else "image"}


PROMPT_FIELDS = {"prompt", "prompt_token_ids", "multi_modal_data"}


def split_prompt(prompt: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Text or token ids, and images, of a prompt in vLLM's form."""
    if unknown := sorted(map(str, {name for name in prompt if prompt[name] is not None} - PROMPT_FIELDS)):
        raise InvalidRequestError(f"a prompt has {', '.join(sorted(PROMPT_FIELDS))}, and no {unknown[0][:100]}")
    media = prompt.get("multi_modal_data") or {}
    if unread := [kind for kind in media if kind != "image"]:
        raise InvalidRequestError(f"multi_modal_data: {str(unread[0])[:100]!r} is not read here; give it to chat")
    images = media.get("image")
    content = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if not isinstance(content, str | list | tuple):
        raise InvalidRequestError("a prompt needs a text as prompt, or a list of token ids as prompt_token_ids")
    return content, [] if images is None else list(images) if isinstance(images, list | tuple) else [images]


def source_of(image: Any) -> ImageSource:
    """A text is a URL, or else a path."""
    if isinstance(image, Sound):
        return replace(source_of(image.content), kind="audio")
    if isinstance(image, Video):
        if isinstance(image.content, list | tuple):
            frames = tuple(source_of(frame).url for frame in image.content)
            return ImageSource("", kind="video", frames=frames, fps=image.fps)
        return video_of(source_of(image.content).url, image.fps)
    if isinstance(image, str) and image.startswith(("data:", "https:", "http:")):
        return ImageSource(image)
    if isinstance(image, str | os.PathLike):
        return ImageSource(_as_url(_read(os.fspath(image))))
    if isinstance(image, bytes):
        return ImageSource(_as_url(image))
    if hasattr(image, "save") and hasattr(image, "mode"):
        return ImageSource(_as_url(_png(image)))
    raise InvalidRequestError(f"an image must be a PIL.Image, a path, a URL or bytes, not {type(image).__name__}")


def _read(path: str) -> bytes:
    try:
        return Path(path.removeprefix("file://")).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"the file {path[:200]!r} cannot be read: {error.strerror}") from error


def _png(image: Any) -> bytes:
    """Lossless, and fast."""
    buffer = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _as_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()
