"""The towers of LLaVA-Next and LLaVA-OneVision: squares of an image, of which the features are put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.anyres import AnyresImages, Grid
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.families.square import LlavaProjector, LlavaTower, llava_parts
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows
from lightserve.vision.vit import CLIP, SIGLIP, Vit


class AnyresTower(LlavaTower):
    def __init__(self, vit: Vit, projector: LlavaProjector, drops_first: bool, layout: AnyresImages) -> None:
        super().__init__(vit, projector, drops_first, layout)
        self.image_newline = nn.Parameter(torch.empty(projector.out_size))
        self._layout = layout

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> VisionTower:
        assert isinstance(layout, AnyresImages)
        is_onevision = files.model_type == "llava_onevision"
        defaults = (SIGLIP, -1) if is_onevision else (CLIP, -2)
        vit, projector, drops_first = llava_parts(files, *defaults)
        if is_onevision:  # the file says "full"
            drops_first = files.hf.get("vision_feature_select_strategy", "full") == "default"
        return cls(vit, projector, drops_first, layout)

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        features = split_rows(self.projected(images), [len(image.tiles) for image in images])
        return [self._pack(of_image, image) for of_image, image in zip(features, images, strict=True)]

    def _pack(self, features: Tensor, image: ImageTiles) -> Tensor:
        """The features of the whole, then those of the grid, row by row."""
        whole, squares = features[0], features[1:]
        if not len(squares):
            return torch.cat((whole, self.image_newline[None]))
        grid = self._layout.grid_of(image.height, image.width)
        inside = _scaled(_without_margins(squares, grid, self._layout.features), grid)
        ends = self.image_newline.expand(len(inside), 1, -1)
        return torch.cat((whole, torch.cat((inside, ends), dim=1).flatten(0, 1)))


def _without_margins(squares: Tensor, grid: Grid, side: int) -> Tensor:
    """``[rows, columns, size]``"""
    tiled = squares.view(grid.tile_rows, grid.tile_columns, side, side, -1).transpose(1, 2)
    whole = tiled.reshape(grid.tile_rows * side, grid.tile_columns * side, -1)
    return whole[grid.top : grid.top + grid.rows, grid.left : grid.left + grid.columns]


def _scaled(features: Tensor, grid: Grid) -> Tensor:
    """To the number of rows and columns that become tokens."""
    wanted = grid.out_rows, grid.out_columns
    if wanted == features.shape[:2]:
        return features
    scaled = F.interpolate(features.permute(2, 0, 1)[None], wanted, mode="bilinear")
    return scaled[0].permute(1, 2, 0)
