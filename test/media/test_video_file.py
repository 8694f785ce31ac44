"""Videos are read within limits, and their frames are chosen as transformers does."""

from __future__ import annotations

import io
import resource
from collections.abc import Sequence
from dataclasses import replace
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightserve.errors import InvalidRequestError
from lightserve.media import video_file
from lightserve.media.layouts.qwen_video import QwenVideo
from lightserve.media.sizes import ImageHeader
from lightserve.media.video_file import (
    PixelBudget,
    VideoHeader,
    decode_frames,
    pack_frames,
    read_animation,
    read_frames,
)
from lightserve.model_files.config.images import ImageFiles
from test.media.corpus import apng, file_of, gif, hostile_videos, noise
from test.vision_model import picture, png

KINDS = ("GIF", "WEBP", "PNG")
VISION = {"vision_config": {"temporal_patch_size": 2, "tokens_per_second": 2}}


def animation(kind: str, count: int, duration: int | list[int] = 100) -> bytes:
    images = [picture(60, 40, number) for number in range(count)]
    buffer = io.BytesIO()
    images[0].save(buffer, kind, save_all=True, append_images=images[1:], duration=duration, loop=0)
    return buffer.getvalue()


def rules(model_type: str, max_tokens: int = 10_000) -> QwenVideo:
    return QwenVideo.read(ImageFiles(model_type, {}, VISION), 28, max_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_an_animation_has_the_rate_of_its_frames(kind: str) -> None:
    header = read_animation(animation(kind, 4, [100, 300, 200, 200]), PixelBudget())

    assert header.size == ImageHeader(60, 40)
    assert header.num_frames == 4
    assert header.fps == pytest.approx(5)


@pytest.mark.parametrize("kind", KINDS)
def test_each_chosen_frame_is_shown_whole(kind: str) -> None:
    data = animation(kind, 6)

    first, last = decode_frames(data, (1, 4))

    for found, number in ((first, 1), (last, 4)):
        wanted = np.asarray(picture(60, 40, number)).astype(int)
        assert np.abs(np.asarray(found).astype(int) - wanted).mean() < 8  # WebP is lossy


def test_a_list_of_frames_is_as_it_was_sent() -> None:
    files = [png(picture(60, 40, number)) for number in range(3)]

    assert read_frames(files, 2, PixelBudget()) == VideoHeader(ImageHeader(60, 40), 3, 2)
    (last,) = decode_frames(pack_frames(files), (2,))
    assert np.array_equal(np.asarray(last), np.asarray(picture(60, 40, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_prefix_of_a_file_does_harm(kind: str) -> None:
    whole = animation(kind, 3)
    for length in range(0, len(whole), 1 + len(whole) // 150):
        try:
            header = read_animation(whole[:length], PixelBudget())
        except InvalidRequestError:
            continue
        assert 1 <= header.num_frames <= 3


def test_a_file_of_a_client_is_no_list_of_frames() -> None:
    with pytest.raises(InvalidRequestError, match="not an image of a known format"):
        read_animation(pack_frames([png(picture(60, 40))]), PixelBudget())


@pytest.mark.parametrize("kind", KINDS)
def test_the_videos_of_a_request_have_one_budget_of_pixels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_file, "MAX_PIXELS", 60 * 40 * 5)
    budget, data = PixelBudget(), animation(kind, 2)
    read_animation(data, budget)
    read_frames([png(picture(60, 40))] * 2, 2, budget)

    with pytest.raises(InvalidRequestError, match=r"frames of 60 x 40 pixels the videos of the request have more than"):
        read_animation(data, budget)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_list_of_large_frames_is_refused_before_they_are_decoded() -> None:
    with pytest.raises(InvalidRequestError, match="with 128 frames of 8000 x 8000 pixels"):
        read_frames([file_of(Image.new("1", (8000, 8000)), "PNG")] * 128, 2, PixelBudget())


def test_frames_of_a_list_are_decoded_one_at_a_time() -> None:
    frames = decode_frames(pack_frames([png(picture(60, 40)), b"no image"]), (0, 1))

    assert next(frames).size == (60, 40)
    with pytest.raises(InvalidRequestError):
        next(frames)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("index", range(len(list(hostile_videos()))))
def test_hostile_videos_are_refused_in_little_memory(index: int) -> None:
    data = list(hostile_videos())[index]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(InvalidRequestError):
        read_animation(data, PixelBudget())

    with pytest.raises(InvalidRequestError):
        list(decode_frames(data, (0, 10_000)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10**6  # kB


def test_pillow_makes_room_for_no_more_pixels_than_an_image_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    core: Any = vars(Image)["core"]
    fill = core.fill

    def counted(mode: str, size: tuple[int, int], *color: Any) -> Any:
        made.append(size)
        return fill(mode, size, *color)

    monkeypatch.setattr(core, "fill", counted)

    with pytest.raises(InvalidRequestError, match="more than 64,000,000 pixels"):
        read_animation(gif((1, 1), (9000, 8000), disposal=2), PixelBudget())
    with pytest.raises(
        InvalidRequestError, match="a frame of the video has 4001 x 4000 pixels; the limit is 16,000,000"
    ):
        read_animation(gif((1, 1), (4001, 4000), disposal=2), PixelBudget())

    assert (1, 1) in made
    assert max(width * height for width, height in made) <= 4001 * 4000


def test_few_animations_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = BoundedSemaphore(1)
    monkeypatch.setattr(video_file, "_reading", reading)
    frames = decode_frames(animation("GIF", 3), (0, 1))

    next(frames)

    assert not reading.acquire(blocking=False)
    list(frames)
    assert reading.acquire(blocking=False)


def test_a_header_must_say_how_many_frames_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="the PNG video has 1 frames, and its header says 100"):
        read_animation(apng(100), PixelBudget())


def test_a_frame_that_the_file_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the video has no frame 5"):
        list(decode_frames(animation("PNG", 2), (0, 5)))


def test_an_image_is_a_video_of_one_frame() -> None:
    size = rules("qwen2_5_vl").size_of(read_animation(file_of(noise(), "JPEG"), PixelBudget()), is_sampled=False)

    assert size.frames == (0,)
    assert len(size.runs) == 1


@pytest.mark.parametrize(
    ("model_type", "count", "fps", "frames"),
    [
        ("qwen2_vl", 8, 4, [0, 2, 4, 6]),  # two a second
        ("qwen2_5_vl", 9, 4, [0, 2, 4, 6]),
        ("qwen2_5_vl", 30, 30, [0, 7, 15, 22]),  # four at least
        ("qwen2_5_vl", 3, 1, [0, 1]),
        ("qwen3_vl", 8, 4, [0, 2, 5, 7]),
        ("qwen3_vl", 30, 30, [0, 10, 19, 29]),
        ("qwen3_vl", 3, 1, [0, 1, 2]),
    ],
)
def test_frames_are_chosen_evenly(model_type: str, count: int, fps: float, frames: Sequence[int]) -> None:
    size = rules(model_type).size_of(VideoHeader(ImageHeader(100, 80), count, fps), is_sampled=False)

    assert list(size.frames) == frames


def test_the_frames_of_a_long_video_are_limited() -> None:
    long = VideoHeader(ImageHeader(100, 80), 9000, 10)

    assert len(rules("qwen3_vl").size_of(long, is_sampled=False).frames) == 128
    with pytest.raises(InvalidRequestError, match="9000 frames; the limit is 128"):
        rules("qwen3_vl").size_of(long, is_sampled=True)


def test_frames_shrink_until_their_tokens_fit() -> None:
    long = VideoHeader(ImageHeader(1920, 1080), 240, 24)
    for model_type in ("qwen2_5_vl", "qwen3_vl"):
        video = replace(rules(model_type, max_tokens=1500), min_pixels=1000, max_pixels=10**8)

        assert 1000 < video.size_of(long, is_sampled=False).tokens <= 1500


def test_a_video_that_cannot_shrink_enough_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"the video has 1,\d+ tokens; the limit is 100"):
        rules("qwen2_5_vl", max_tokens=100).size_of(VideoHeader(ImageHeader(1920, 1080), 240, 24), is_sampled=False)


def test_times_are_positions_or_texts() -> None:
    video = VideoHeader(ImageHeader(100, 80), 6, 1)

    assert rules("qwen2_vl").size_of(video, is_sampled=True).times == (0, 1, 2)
    assert rules("qwen2_5_vl").size_of(video, is_sampled=True).times == (0, 4, 8)  # two seconds of two tokens
    third = rules("qwen3_vl").size_of(video, is_sampled=True)
    assert third.times == ()
    assert third.texts == ("<0.5 seconds>", "<2.5 seconds>", "<4.5 seconds>")
