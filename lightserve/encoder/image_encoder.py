"""Encodes images with the vision tower of the model, into rows of the arena. It knows no process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
import torch

from lightserve.common.device import Device, pick_device
from lightserve.config import ServerConfig, WorkerConfig
from lightserve.media.image_file import Pixels
from lightserve.media.layout import ImageLayout, read_layout
from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.media import EncodeImage
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import ModelSource, resolve
from lightserve.vision.load import load_tower
from lightserve.vision.tower import ImageTiles, VisionTower

GIB = 2**30
GPU_PATCHES = 16_384  # of several images that are encoded at once


class DecodedImage(NamedTuple):
    tiles: list[Pixels]  # or the frames of a video
    height: int  # of its ImageSize
    width: int


class ImageEncoder:
    def __init__(
        self, tower: VisionTower, layout: ImageLayout, arena: mmap, platform: Device, device: torch.device
    ) -> None:
        self._tower = tower
        self.layout = layout  # how the model reads an image
        self._platform = platform
        self._device = device
        values = torch.frombuffer(arena, dtype=next(tower.parameters()).dtype)
        width = tower.row_width
        self._arena = values[: len(values) // width * width].view(-1, width)
        # A CPU encodes several images no faster than one after the other. A GPU computes the largest image alone, and
        # no more at once than it needs: so an image waits for few others, and steps of the model come in between.
        self.max_tokens = GPU_PATCHES // layout.patches_per_token if device.type != "cpu" else 1

    @property
    def num_rows(self) -> int:
        return len(self._arena)

    def resized(self, pictures: Iterable[Any], message: EncodeImage) -> DecodedImage:
        """An image, or the frames of a video. From any thread."""
        tiles = [tile for each in pictures for tile in self.layout.pixels(each, message.height, message.width)]
        return DecodedImage(tiles, message.height, message.width)

    @property
    def summary(self) -> str:
        """For the operator."""
        weights = sum(parameter.nbytes for parameter in self._tower.parameters()) / GIB
        memory = self._arena.nbytes / GIB
        kind = "audio" if "audio" in self.layout.kinds else "vision"
        return (
            f"{weights:.2f} GiB of {kind} weights on {self._device.type}; embeddings of {self.num_rows:,} tokens in "
            f"{memory:.2f} GiB of host memory"
        )

    @torch.inference_mode()
    def encode(self, batch: Sequence[tuple[DecodedImage, Int32Array]]) -> list[bool]:
        """Images, and rows for their embeddings. Returns which are finite."""
        self._platform.set_current(self._device)  # of this thread
        embeddings = self._tower.encode([self._on_device(image) for image, _ in batch])
        are_finite = torch.stack([of_image.isfinite().all() for of_image in embeddings])
        copied = self._platform.copy_to_host(are_finite, *(of_image.to(self._arena.dtype) for of_image in embeddings))
        finite_on_host, *rows_on_host = copied.tensors()
        for rows, (_, arena_rows) in zip(rows_on_host, batch, strict=True):
            self._arena.index_copy_(0, torch.from_numpy(arena_rows.astype("int64")), rows)
        finite: list[bool] = finite_on_host.tolist()
        return finite

    def _on_device(self, image: DecodedImage) -> ImageTiles:
        return ImageTiles([torch.tensor(tile, device=self._device) for tile in image.tiles], image.height, image.width)

    def warm_up(self) -> None:
        """Run the largest batch once, so that its memory is taken before the KV pool is sized."""
        largest, tiles = self.layout.largest, self.layout.blank()
        count = max(self.max_tokens // largest.tokens, 1)  # of images in the largest batch
        if count * largest.tokens <= self.num_rows:
            rows = np.arange(count * largest.tokens, dtype=np.int32).reshape(count, -1)
            image = DecodedImage(tiles, largest.height, largest.width)
            self.encode([(image, of_image) for of_image in rows])


def load_encoder(config: ServerConfig, arena: mmap, device_index: int = 0) -> ImageEncoder:
    worker = config.worker
    platform = pick_device(worker.device)
    device = platform.torch_device(device_index)
    platform.bind(device, worker.deterministic, worker.ops_backend)
    source = resolve(worker.model_dir, needs_weights=worker.load_format == "auto", trusts_code=worker.trust_remote_code)
    layout = read_layout(read_image_files(source), config.http.max_image_tokens)
    dtype = _dtype(worker, source, platform)
    tower = load_tower(source, layout, worker.load_format == "auto", dtype, device)
    encoder = ImageEncoder(tower, layout, arena, platform, device)
    if device.type != "cpu":
        encoder.warm_up()
    return encoder


def _dtype(worker: WorkerConfig, source: ModelSource, platform: Device) -> torch.dtype:
    """That of the workers."""
    if worker.data_type != "auto":
        dtype: torch.dtype = getattr(torch, worker.data_type)
        return dtype
    hf = source.hf_config()
    return platform.dtype_for(hf.get("dtype") or hf.get("torch_dtype"))
