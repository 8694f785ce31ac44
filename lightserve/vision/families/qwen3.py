"""The vision tower of Qwen3-VL and Qwen3.5: learned positions, and vectors of some blocks for the first text layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.errors import ModelFilesError
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.qwen import QwenImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, axial_angles
from lightserve.vision.families.qwen import COLORS, THETA, Grid, patch_places, patches_and_grids, token_counts
from lightserve.vision.qwen_layers import EPS, Attention, Block
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows


@dataclass(frozen=True, slots=True)
class Qwen3Vision:
    """``vision_config`` of config.json."""

    size: int
    out_size: int
    depth: int
    heads: int
    inside: int  # of the feed-forward
    positions: int  # a side of the square of learned positions
    times: int  # a patch has so many frames; an image is all of them
    stacked: tuple[int, ...]  # DeepStack: blocks whose output the text model gets too

    @classmethod
    def read(cls, files: ImageFiles) -> Qwen3Vision:
        vision = files.vision
        files.check_gelu_tanh()
        try:
            return cls(
                size=vision["hidden_size"],
                out_size=vision["out_hidden_size"],
                depth=vision["depth"],
                heads=vision["num_heads"],
                inside=vision["intermediate_size"],
                positions=int(vision.get("num_position_embeddings", 2304) ** 0.5),
                times=vision.get("temporal_patch_size", 2),
                stacked=tuple(vision.get("deepstack_visual_indexes") or ()),
            )
        except KeyError as error:
            raise ModelFilesError(f"config.json: vision_config has no {error}; fetch it again") from error


class GeluMlp(nn.Module):
    def __init__(self, size: int, inside: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(size, inside)
        self.linear_fc2 = nn.Linear(inside, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class SquareMerger(nn.Module):
    """A square of patches becomes the vector of a token. The norm is of a patch, or of the whole square."""

    def __init__(self, config: Qwen3Vision, patches: int, norms_square: bool) -> None:
        super().__init__()
        self._width, self._norms_square = config.size * patches, norms_square
        self.norm = nn.LayerNorm(self._width if norms_square else config.size, eps=EPS)
        self.linear_fc1 = nn.Linear(self._width, self._width)
        self.linear_fc2 = nn.Linear(self._width, config.out_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.view(-1, self._width)) if self._norms_square else self.norm(x).view(-1, self._width)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(normed)))
        return out


class Qwen3Tower(VisionTower):
    prefixes = ("model.visual.", "visual.")

    def __init__(self, config: Qwen3Vision, images: QwenImages) -> None:
        super().__init__()
        self.config = config
        self.images = images
        squares = images.merge**2
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(COLORS * config.times * images.patch**2, config.size)})
        self.pos_embed = nn.Embedding(config.positions**2, config.size)
        self.blocks = nn.ModuleList([self._block() for _ in range(config.depth)])
        self.merger = SquareMerger(config, squares, norms_square=False)
        self.deepstack_merger_list = nn.ModuleList(
            [SquareMerger(config, squares, norms_square=True) for _ in config.stacked]
        )

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Qwen3Tower:
        assert isinstance(layout, QwenImages)
        return cls(Qwen3Vision.read(files), layout)

    @property
    def row_width(self) -> int:
        return self.config.out_size * (1 + len(self.config.stacked))

    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        patches, grids = patches_and_grids(images, self.images, self.config.times)
        rows = self(patches.to(self.pos_embed.weight.dtype), grids)
        return split_rows(rows, token_counts(images, self.images, self.config.times))

    def _block(self) -> Block:
        size = self.config.size
        norms = nn.LayerNorm(size, eps=EPS), nn.LayerNorm(size, eps=EPS)
        return Block(norms, Attention(size, self.config.heads), GeluMlp(size, self.config.inside))

    @torch.inference_mode()
    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[tokens, row_width]`` of all images: the embedding of each token, then a vector of each stacked block."""
        device, config = patches.device, self.config
        places = [patch_places(rows, columns, self.images.merge).to(device) for rows, columns in grids]
        whole = Segments([rows * columns for rows, columns in grids], device)
        x = self.patch_embed["proj"](patches) + torch.cat(
            [self._positions(of_image, grid) for of_image, grid in zip(places, grids, strict=True)]
        )
        rows, columns = torch.cat(places).unbind(1)
        angles = axial_angles(rows, columns, config.size // config.heads, THETA)
        stacked: list[Tensor] = []  # in the order of the blocks
        for number, block in enumerate(self.blocks):
            x = block(x, angles, whole)
            if number in config.stacked:
                stacked.append(self.deepstack_merger_list[config.stacked.index(number)](x))
        return torch.cat([self.merger(x), *stacked], dim=1)

    def _positions(self, places: Tensor, grid: Grid) -> Tensor:
        """The learned square stretched over the image: of each patch, a mean of the four positions around it."""
        last = self.config.positions - 1
        sides = places.new_tensor([max(length - 1, 1) for length in grid])
        at = places.float() * last / sides
        first = at.floor()
        near, weights = first.long(), at - first
        out = torch.zeros((), device=places.device)  # in float32
        for down in (0, 1):
            for right in (0, 1):
                row, column = (near + near.new_tensor([down, right])).clamp(max=last).unbind(1)
                share = (weights - weights.new_tensor([1 - down, 1 - right])).abs().prod(1, keepdim=True)
                out = out + self.pos_embed(row * (last + 1) + column) * share
        return out.to(self.pos_embed.weight.dtype)
