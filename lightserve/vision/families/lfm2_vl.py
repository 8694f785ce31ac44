"""The tower of LFM2-VL: SigLIP 2 over pictures of any size, whose squares of patches become tokens.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.lfm2_vl import Lfm2VlImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments
from lightserve.vision.siglip import SiglipLayer
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows
from lightserve.vision.vit import COLORS, activation, normalised, pixel_patches

PARTS = ("vision_tower.", "multi_modal_projector.")
UNUSED = ("vision_tower.head.",)
PROJECTED = 2560  # numbers between the linears of the projector, if the files do not say
Grid = tuple[int, int]  # patches: rows and columns


@dataclass(frozen=True, slots=True)
class Siglip2Vision:
    """``vision_config`` of config.json, with the defaults of transformers."""

    size: int
    inside: int
    layers: int
    heads: int
    positions: int  # a side of the square of learned positions
    eps: float

    @classmethod
    def read(cls, files: ImageFiles) -> Siglip2Vision:
        vision = files.vision
        files.check_gelu_tanh()
        return cls(
            vision.get("hidden_size", 768),
            vision.get("intermediate_size", 3072),
            vision.get("num_hidden_layers", 12),
            vision.get("num_attention_heads", 12),
            int(vision.get("num_patches", 256) ** 0.5),
            vision.get("layer_norm_eps", 1e-6),
        )


class Siglip2Embeddings(nn.Module):
    def __init__(self, config: Siglip2Vision, patch: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(COLORS * patch**2, config.size)
        self.position_embedding = nn.Embedding(config.positions**2, config.size)
        self._side = config.positions

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        x = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype))
        positions = {grid: self._positions(grid) for grid in set(grids)}
        out: Tensor = x + torch.cat([positions[grid] for grid in grids])
        return out

    def _positions(self, grid: Grid) -> Tensor:
        """The learned square stretched over a picture."""
        weight = self.position_embedding.weight
        square = weight.view(self._side, self._side, -1).permute(2, 0, 1)[None].float()
        stretched = F.interpolate(square, grid, mode="bilinear", antialias=True)
        return stretched[0].flatten(1).T.to(weight.dtype)


class Siglip2Vit(nn.Module):
    def __init__(self, config: Siglip2Vision, patch: int) -> None:
        super().__init__()
        layers = [SiglipLayer(config.size, config.inside, config.heads, config.eps) for _ in range(config.layers)]
        self.embeddings = Siglip2Embeddings(config, patch)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = nn.LayerNorm(config.size, eps=config.eps)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[patches, size]`` of all pictures."""
        x = self.embeddings(patches, grids)
        segments = Segments([rows * columns for rows, columns in grids], x.device)
        layers: Any = self.encoder["layers"]
        for layer in layers:
            x = layer(x, segments)
        out: Tensor = self.post_layernorm(x)
        return out


class Lfm2VlProjector(nn.Module):
    def __init__(self, files: ImageFiles, size: int) -> None:
        super().__init__()
        hf = files.hf
        inside, has_bias = hf.get("projector_hidden_size", PROJECTED), hf.get("projector_bias", True)
        self.layer_norm = nn.LayerNorm(size) if hf.get("projector_use_layernorm", True) else nn.Identity()
        self.linear_1 = nn.Linear(size, inside, bias=has_bias)
        self.linear_2 = nn.Linear(inside, files.text_size, bias=has_bias)
        self._activation = activation(hf.get("projector_hidden_act", "gelu"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self._activation(self.linear_1(self.layer_norm(x))))
        return out


class Lfm2VlTower(VisionTower):
    prefixes = PARTS

    def __init__(self, files: ImageFiles, layout: Lfm2VlImages) -> None:
        super().__init__()
        config = Siglip2Vision.read(files)
        self.vision_tower = Siglip2Vit(config, layout.patch)
        self.multi_modal_projector = Lfm2VlProjector(files, config.size * layout.merge**2)
        self._layout = layout

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Lfm2VlTower:
        assert isinstance(layout, Lfm2VlImages)
        return cls(files, layout)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
        return name if name.startswith(PARTS) and not name.startswith(UNUSED) else None

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.linear_2.out_features

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        layout, patch = self._layout, self._layout.patch
        pictures = list(chain.from_iterable(image.tiles for image in images))
        grids = [(picture.shape[0] // patch, picture.shape[1] // patch) for picture in pictures]
        patches = [pixel_patches(normalised(picture, layout.mean, layout.std), patch) for picture in pictures]
        features = split_rows(self.vision_tower(torch.cat(patches), grids), [len(each) for each in patches])
        squares = [self._squares(of_picture, grid) for of_picture, grid in zip(features, grids, strict=True)]
        rows = self.multi_modal_projector(torch.cat(squares))
        return split_rows(rows, [self._tokens(image) for image in images])

    def _squares(self, x: Tensor, grid: Grid) -> Tensor:
        """``[tokens, size * merge * merge]``: the patches of a token side by side, row by row."""
        merge = self._layout.merge
        squares = x.view(grid[0] // merge, merge, grid[1] // merge, merge, -1).transpose(1, 2)
        return squares.flatten(0, 1).flatten(1)

    def _tokens(self, image: ImageTiles) -> int:
        return sum(tile.shape[0] * tile.shape[1] for tile in image.tiles) // self._layout.side**2
