"""No file ends the encoder process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

import pytest
from PIL import Image

from lightserve.encoder.image_encoder import ImageEncoder
from lightserve.encoder.main import decode_image
from lightserve.media.layouts.qwen import QwenImages
from lightserve.media.video_file import pack_frames
from lightserve.messages.int_arrays import NO_INT32
from lightserve.messages.media import EncodeImage
from lightserve.model_files.config.images import ImageFiles
from test.media.corpus import apng, file_of, noise
from test.vision_model import FILES


class SizesOnly:
    """In place of an encoder, which needs the weights of a model."""

    layout = QwenImages.read(ImageFiles("qwen2_5_vl", FILES, {"vision_config": {}}), None)

    def resized(self, pictures: Iterable[Image.Image], message: EncodeImage) -> Any:
        return [each.size for each in pictures]


def decoded(data: bytes, *frames: int) -> Any:
    return decode_image(cast(ImageEncoder, SizesOnly()), EncodeImage(b"", 28, 28, NO_INT32, data, frames))


def test_an_image_and_the_frames_of_a_video_are_decoded() -> None:
    file = file_of(noise(), "PNG")

    assert decoded(file).image == [(90, 70)]
    assert decoded(pack_frames([file] * 3), 0, 2).image == [(90, 70)] * 2
    assert decoded(pack_frames([file] * 3), 0, 2).decode_s > 0


def test_a_frame_that_is_missing_fails_its_request() -> None:
    found = decoded(apng(100), 0, 50)

    assert (found.image, found.status) == (None, 400)
    assert "the video has no frame 50" in found.message


def test_an_error_of_another_kind_fails_its_request_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        found = decoded(pack_frames([file_of(noise(), "PNG")]), 5)  # no router asks for this frame

    assert (found.image, found.status) == (None, 500)
    assert found.message == "the server failed to decode an image of the request"
    assert "could not be decoded" in caplog.text
