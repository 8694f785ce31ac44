"""Encodes images with the vision tower of the model, into rows of the arena. It knows no process."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

import torch

from lightserve.common.device import Device, pick_device
from lightserve.config import ServerConfig, WorkerConfig
from lightserve.media.image_file import Pixels
from lightserve.media.qwen import QwenImages
from lightserve.messages.int_arrays import Int32Array
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import ModelSource, resolve
from lightserve.vision.load import load_tower
from lightserve.vision.qwen import QwenTower, patches_of

GIB = 2**30
GPU_PATCHES = 16_384  # encoded at once, if the largest image has no more


class ImageEncoder:
    def __init__(self, tower: QwenTower, images: QwenImages, arena: mmap, device: torch.device) -> None:
        self._tower = tower
        self._images = images
        self._device = device
        values = torch.frombuffer(arena, dtype=next(tower.parameters()).dtype)
        width = tower.config.out_size
        self._arena = values[: len(values) // width * width].view(-1, width)
        # a CPU encodes several images no faster than one after the other
        self.max_patches = max(GPU_PATCHES, images.most_tokens * images.merge**2) if device.type != "cpu" else 1

    @property
    def images(self) -> QwenImages:
        """How the model reads an image."""
        return self._images

    @property
    def num_rows(self) -> int:
        return len(self._arena)

    def patches_of(self, height: int, width: int) -> int:
        return height * width // self._images.patch**2

    @property
    def summary(self) -> str:
        """For the operator."""
        weights = sum(parameter.nbytes for parameter in self._tower.parameters()) / GIB
        memory = self._arena.nbytes / GIB
        return (
            f"{weights:.2f} GiB of vision weights on {self._device.type}; embeddings of {self.num_rows:,} tokens in "
            f"{memory:.2f} GiB of host memory"
        )

    @torch.inference_mode()
    def encode(self, batch: Sequence[tuple[Pixels, Int32Array]]) -> list[bool]:
        """Pixels ``[height, width, 3]`` of images, and rows for their embeddings. Returns which are finite."""
        patch = self._images.patch
        grids = [(pixels.shape[0] // patch, pixels.shape[1] // patch) for pixels, _ in batch]
        inputs = [
            patches_of(torch.tensor(pixels, device=self._device), self._images, self._tower.config.times)
            for pixels, _ in batch
        ]
        embeddings = self._tower(torch.cat(inputs).to(self._arena.dtype), grids).cpu()
        are_finite: list[bool] = []
        for rows, (_, arena_rows) in zip(embeddings.split([len(rows) for _, rows in batch]), batch, strict=True):
            self._arena[torch.from_numpy(arena_rows.astype("int64"))] = rows
            are_finite.append(bool(rows.isfinite().all()))
        return are_finite

    def warm_up(self) -> None:
        """Run the largest batch once, so that its memory is taken before the KV pool is sized."""
        rows = self.max_patches // self._images.merge**2
        shape = (rows * self._images.side, self._images.side, 3)
        pixels = torch.zeros(shape, dtype=torch.uint8).numpy()
        if rows <= self.num_rows:
            self.encode([(pixels, torch.arange(rows, dtype=torch.int32).numpy())])


def load_encoder(config: ServerConfig, arena: mmap, device_index: int = 0) -> ImageEncoder:
    worker = config.worker
    platform = pick_device(worker.device)
    device = platform.torch_device(device_index)
    platform.bind(device, worker.deterministic)
    source = resolve(worker.model_dir, needs_weights=worker.load_format == "auto", trusts_code=worker.trust_remote_code)
    images = QwenImages.read(*read_image_files(source), config.http.max_image_tokens)
    dtype = _dtype(worker, source, platform)
    encoder = ImageEncoder(load_tower(source, worker.load_format == "auto", dtype, device), images, arena, device)
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
