"""What is refused before a file is fetched or while files are."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.media.fetch.fetcher import MEDIA_FLAGS, Fetcher
from lightserve.media.layouts.qwen import QwenImages
from lightserve.media.reader import MB, ImageReader
from lightserve.media.sources import ImageSource, ReadImage
from lightserve.media.video_texts import VideoTexts
from lightserve.model_files.config.images import ImageFiles
from lightserve.outbound.urls import UrlRules
from test.media.fetch.image_host import ImageHost, answer, image_host
from test.vision_model import FILES, picture, png, video_preprocessor_of

FAMILY = "qwen2_5_vl"
LAYOUT = QwenImages.read(ImageFiles(FAMILY, FILES, {"vision_config": {}}, video=video_preprocessor_of(FAMILY)), None)
RULES = UrlRules(MEDIA_FLAGS, private_hosts=("localhost",), allows_http=True)
LIMITS = {"image": 16, "video": 3}
TEXTS = VideoTexts("<start>", "<video>", "<end>")


def read(videos: Sequence[int], file: bytes, texts: VideoTexts | None = TEXTS) -> tuple[str, ImageHost]:
    """``videos``: the number of frames of each. The error, and what the host saw."""

    async def run() -> tuple[str, ImageHost]:
        async with image_host(lambda target: answer(file), is_tls=False) as host:
            fetcher = Fetcher(RULES, 2 * MB, 10.0, lambda name, port: ["127.0.0.1"])
            reader = ImageReader(LAYOUT, 5, "<image>", LIMITS, 2 * MB, fetcher, video=texts)
            sources = [
                ImageSource(
                    "",
                    kind="video",
                    frames=tuple(host.url(f"/{number}/{frame}", scheme="http") for frame in range(count)),
                )
                for number, count in enumerate(videos)
            ]
            try:
                await reader.read_all(sources, "")
            except InvalidRequestError as error:
                return str(error), host
            return "", host

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("videos", "texts", "message"),
    [
        ([4], None, "video 1 of the request: this model reads no videos"),
        ([4, 129], TEXTS, "video 2 of the request: it has more than 128 frames"),
        ([128, 128, 1], TEXTS, "the request has 257 URLs of other servers; the limit is 256"),
        ([1, 1, 1, 1], TEXTS, "the request has 4 videos; the limit is 3 (--limit_mm_per_prompt)"),
    ],
)
def test_nothing_is_fetched_for_a_request_that_asks_for_too_much(
    videos: Sequence[int], texts: VideoTexts | None, message: str
) -> None:
    refusal, host = read(videos, png(picture(60, 60)), texts)

    assert message in refusal
    assert not host.heads


def read_urls(*urls: str) -> list[ReadImage]:
    reader = ImageReader(LAYOUT, 5, "<image>", LIMITS, 2 * MB)
    return asyncio.run(reader.read_all([ImageSource(url) for url in urls], ""))


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_base64_may_have_lines(line_end: str) -> None:
    file = png(picture(60, 60))
    lines = base64.encodebytes(file).decode().replace("\n", line_end)

    (read_image,) = read_urls("data:image/png;base64," + lines)

    assert read_image.data == file


@pytest.mark.parametrize("data", ["AA A", "AA=A", "AAA", "A-_A", "@@@@"])
def test_what_is_no_base64_is_refused(data: str) -> None:
    with pytest.raises(InvalidRequestError, match="image 1 of the request: its data is not base64"):
        read_urls("data:;base64," + data)


def test_the_frames_of_a_video_are_fetched() -> None:
    refusal, host = read([3], png(picture(60, 60)))

    assert refusal == ""
    assert len(host.heads) == 3


def test_a_video_is_fetched_until_it_is_too_large() -> None:
    refusal, host = read([100], bytes(MB))

    assert "video 1 of the request: it has more than 2 MB (--max_image_mb)" in refusal
    assert 3 <= len(host.heads) < 50
