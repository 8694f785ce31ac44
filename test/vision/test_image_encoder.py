"""The encoder writes the embeddings of images to rows of the arena, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.config.parse import parse_server
from lightserve.encoder.image_encoder import DecodedImage, ImageEncoder, load_encoder
from lightserve.media.sizes import ImageHeader
from lightserve.messages.int_arrays import Int32Array
from test.vision_model import picture, save_vision_model

SIZES = [(140, 84), (56, 56), (140, 84), (90, 200)]


@pytest.fixture(autouse=True)
def _definitions_afterwards() -> Iterator[None]:
    """An encoder binds the ops of its device."""
    yield
    ops.use_backend(ops.REFERENCE)


class Encoded:
    """What an encoder of a device writes for pictures of these sizes, to rows that are not in order."""

    def __init__(self, folder: str, *flags: str) -> None:
        self.arena = mmap(-1, 2**20)
        self.encoder: ImageEncoder = load_encoder(parse_server(["--model_dir", folder, *flags]), self.arena)
        images = [self._decoded(*size) for size in SIZES]
        rows = np.random.default_rng(5).permutation(self.encoder.num_rows).astype(np.int32)
        self.rows: list[Int32Array] = []
        for image in images:
            count = self.encoder.layout.size_of(ImageHeader(image.width, image.height)).tokens
            self.rows.append(rows[:count])
            rows = rows[count:]
        self.are_finite = self.encoder.encode(list(zip(images, self.rows, strict=True)))

    def _decoded(self, width: int, height: int) -> DecodedImage:
        size = self.encoder.layout.size_of(ImageHeader(width, height))
        image = picture(width, height, width)
        return DecodedImage(self.encoder.layout.pixels(image, size.height, size.width), size.height, size.width)

    def embeddings(self, dtype: torch.dtype) -> list[Tensor]:
        values = torch.frombuffer(self.arena, dtype=dtype)
        width = len(values) // self.encoder.num_rows
        table = values[: self.encoder.num_rows * width].view(-1, width)
        return [table[torch.from_numpy(rows).long()].float() for rows in self.rows]


def test_each_image_of_a_batch_has_its_rows(tmp_path: Path) -> None:
    folder, _ = save_vision_model(tmp_path)
    encoded = Encoded(str(folder), "--device", "cpu", "--data_type", "float32")

    first, _, same, last = encoded.embeddings(torch.float32)
    assert encoded.are_finite == [True] * len(SIZES)
    torch.testing.assert_close(first, same)
    assert last.abs().min(dim=1).values.max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_gpu_writes_what_a_cpu_writes(model_type: str, tmp_path: Path) -> None:
    folder, _ = save_vision_model(tmp_path, model_type)
    on_cpu = Encoded(str(folder), "--device", "cpu", "--data_type", "float32")
    on_gpu = Encoded(str(folder), "--device", "cuda", "--data_type", "bfloat16")

    assert on_gpu.are_finite == [True] * len(SIZES)
    for found, wanted in zip(on_gpu.embeddings(torch.bfloat16), on_cpu.embeddings(torch.float32), strict=True):
        likeness = torch.cosine_similarity(found, wanted, dim=1)
        assert likeness.min() > 0.99, likeness
