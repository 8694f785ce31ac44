"""The embedder of Gemma 4 12B, which has no tower: squares of pixels become tokens by one linear and norms.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.gemma4 import Gemma4Images
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.rms_norm import rms_normed
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows
from lightserve.vision.vit import COLORS, normalised, pixel_patches

SIZE, POSITIONS, EPS = 3840, 1120, 1e-6  # if the files do not say
# in published files, and in those that transformers loads and saves
PARTS = ("vision_embedder.", "embed_vision.")


class Gemma4UnifiedTower(VisionTower):
    prefixes = PARTS

    def __init__(self, files: ImageFiles, layout: Gemma4Images) -> None:
        super().__init__()
        vision, inputs = files.vision, COLORS * layout.side**2
        size, positions = int(vision.get("mm_embed_dim", SIZE)), int(vision.get("mm_posemb_size", POSITIONS))
        self.patch_ln1 = nn.LayerNorm(inputs)
        self.patch_dense = nn.Linear(inputs, size)
        self.patch_ln2 = nn.LayerNorm(size)
        self.pos_embedding = nn.Parameter(torch.empty(positions, 2, size))
        self.pos_norm = nn.LayerNorm(size)
        self.embedding_projection = nn.Linear(size, files.text_size, bias=False)
        self._eps = float(vision.get("rms_norm_eps", EPS))
        self._layout = layout

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Gemma4UnifiedTower:
        assert isinstance(layout, Gemma4Images)
        return cls(files, layout)

    def own_name(self, name: str) -> str | None:
        own_name = super().own_name(name.removeprefix("model."))
        return None if own_name is None else own_name.removeprefix("multimodal_embedder.")

    @property
    def row_width(self) -> int:
        return self.embedding_projection.out_features

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        layout, side = self._layout, self._layout.side
        tiles = [normalised(image.tiles[0], layout.mean, layout.std) for image in images]
        patches = torch.cat([pixel_patches(tile, side) for tile in tiles])
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(patches.to(self.patch_dense.weight.dtype))))
        grids = [(image.height // side, image.width // side) for image in images]
        x = self.pos_norm(x + torch.cat([self._positions(*grid) for grid in grids]))
        rows = self.embedding_projection(rms_normed(x, self._eps))
        return split_rows(rows, [height * width for height, width in grids])

    def _positions(self, rows: int, columns: int) -> Tensor:
        of_columns, of_rows = self.pos_embedding[:columns, 0], self.pos_embedding[:rows, 1]
        return (of_columns[None] + of_rows[:, None]).flatten(0, 1)
