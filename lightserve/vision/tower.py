"""What all vision towers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.model_files.config.images import ImageFiles


class ImageTiles(NamedTuple):
    tiles: Sequence[Tensor]  # or frames of a video; [height, width, 3] uint8 each
    height: int  # of its ImageSize
    width: int


class PackedPart(nn.Module, ABC):
    """A part of a tower whose parameters take another form once they have values."""

    @abstractmethod
    def pack(self) -> None: ...


class VisionTower(nn.Module, ABC):
    """Computes the embeddings of images. Its parameters have the names of the checkpoint, after a prefix.

    A weight of patches is that of a linear: a convolution's is flattened when it is loaded.
    """

    prefixes: ClassVar[tuple[str, ...]]  # in the checkpoint, the longest first

    @property
    @abstractmethod
    def row_width(self) -> int:
        """Numbers of a token: its embedding, and what is added behind the first layers: see ``vectors_per_token``."""

    @abstractmethod
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        """``[tokens, row_width]`` of each image."""

    def pack(self) -> None:
        """Called when the parameters have values: they may take a form that computes faster, and lose their names."""
        for module in self.modules():
            if isinstance(module, PackedPart):
                module.pack()

    def own_name(self, name: str) -> str | None:
        """The name of a checkpoint's tensor in the tower; None: it belongs to another part of the model."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        return None if prefix is None else name.removeprefix(prefix)


class LinearProjector(nn.Module):
    """To the size of a token."""

    def __init__(self, size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out_size)
        self.out_size = out_size

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def make_tower(files: ImageFiles, layout: ImageLayout) -> VisionTower:
    """Its parameters have no values."""
    module, _, name = files.family.tower.partition(":")
    with torch.device("meta"):
        tower: VisionTower = getattr(import_module(module), name).read(files, layout)
    return tower


def split_rows(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    parts: Any = rows.split_with_sizes(list(counts))
    return tuple(parts)
