"""The tower of GLM-4.1V, 4.5V and 4.6V: learned positions that are stretched over the image, and rotary ones.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.glm4v import PATCH, Glm4vImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, axial_angles
from lightserve.vision.families.qwen import COLORS, THETA, Grid, patch_places, patches_and_grids, token_counts
from lightserve.vision.qwen_layers import Attention, Block
from lightserve.vision.rms_norm import RmsNorm
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows
from lightserve.vision.vit import activation

DEFAULTS: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "image_size": 336,
    "patch_size": PATCH,
    "rms_norm_eps": 1e-5,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13_696,
}


@dataclass(frozen=True, slots=True)
class Glm4vVision:
    """``vision_config`` of config.json."""

    depth: int
    size: int
    activation: str
    has_bias: bool  # of queries, keys and values
    heads: int
    positions: int  # a side of the square of learned positions
    eps: float
    theta: float
    times: int  # a patch has so many frames; an image is all of them
    out_size: int  # and of the feed-forward of a layer
    inside: int  # of the merger

    @classmethod
    def read(cls, files: ImageFiles) -> Glm4vVision:
        values = {**DEFAULTS, **files.vision}
        rope = values.get("rope_parameters") or {}
        return cls(
            values["depth"],
            values["hidden_size"],
            values["hidden_act"],
            bool(values["attention_bias"]),
            values["num_heads"],
            values["image_size"] // values["patch_size"],
            values["rms_norm_eps"],
            float(rope.get("rope_theta") or THETA),
            values["temporal_patch_size"],
            values["out_hidden_size"],
            values["intermediate_size"],
        )


class Glm4vAttention(Attention):
    def __init__(self, config: Glm4vVision) -> None:
        super().__init__(config.size, config.heads)
        self.qkv = nn.Linear(config.size, 3 * config.size, bias=config.has_bias)
        self.proj = nn.Linear(config.size, config.size, bias=False)


class GatedMlp(nn.Module):
    def __init__(self, size: int, inside: int, activation_name: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inside, bias=False)
        self.up_proj = nn.Linear(size, inside, bias=False)
        self.down_proj = nn.Linear(inside, size, bias=False)
        self._activation = activation(activation_name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Glm4vMerger(GatedMlp):
    """Behind ``downsample``, which makes a vector of each square of patches."""

    def __init__(self, config: Glm4vVision) -> None:
        super().__init__(config.out_size, config.inside, config.activation)
        self.proj = nn.Linear(config.out_size, config.out_size, bias=False)
        self.post_projection_norm = nn.LayerNorm(config.out_size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class Glm4vTower(VisionTower):
    prefixes = ("model.visual.", "visual.")

    def __init__(self, config: Glm4vVision, images: Glm4vImages) -> None:
        super().__init__()
        self.config = config
        self.images = images
        inputs = COLORS * config.times * images.patch**2
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(inputs, config.size)})
        self.post_conv_layernorm = self._norm()
        self.embeddings = nn.ModuleDict({"position_embedding": nn.Embedding(config.positions**2, config.size)})
        self.blocks = nn.ModuleList([self._block() for _ in range(config.depth)])
        self.post_layernorm = self._norm()
        self.downsample = nn.Linear(config.size * images.merge**2, config.out_size)
        self.merger = Glm4vMerger(config)

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Glm4vTower:
        assert isinstance(layout, Glm4vImages)
        return cls(Glm4vVision.read(files), layout)

    @property
    def row_width(self) -> int:
        return self.config.out_size

    def _norm(self) -> RmsNorm:
        return RmsNorm(self.config.size, self.config.eps)

    def _block(self) -> Block:
        config = self.config
        mlp = GatedMlp(config.size, config.out_size, config.activation)
        return Block((self._norm(), self._norm()), Glm4vAttention(config), mlp)

    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        patches, grids = patches_and_grids(images, self.images, self.config.times)
        rows = self(patches.to(self.downsample.weight.dtype), grids)
        return split_rows(rows, token_counts(images, self.images, self.config.times))

    @torch.inference_mode()
    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[tokens, out_size]`` of all images."""
        device, config, merge = patches.device, self.config, self.images.merge
        places = [patch_places(*grid, merge).to(device) for grid in grids]
        rows, columns = torch.cat(places).unbind(1)
        angles = axial_angles(rows, columns, config.size // config.heads, config.theta)
        segments = Segments([len(of_image) for of_image in places], device)
        x = self.post_conv_layernorm(self.patch_embed["proj"](patches)) + self._positions(places, grids)
        for block in self.blocks:
            x = block(x, angles, segments)
        squares = self.post_layernorm(x).view(-1, merge**2, config.size).transpose(1, 2)  # of each channel its patches
        tokens: Tensor = self.merger(self.downsample(squares.flatten(1)))
        return tokens

    def _positions(self, places: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """The learned square stretched over each image."""
        weight: Any = self.embeddings["position_embedding"].weight
        side = self.config.positions
        square = weight.view(side, side, -1).permute(2, 0, 1)[None].float()
        shares = [
            (of_image + 0.5) / torch.tensor(grid, dtype=torch.float32, device=weight.device) * 2 - 1
            for of_image, grid in zip(places, grids, strict=True)
        ]
        at = torch.cat(shares).flip(1)[None, :, None]  # column and row of each patch, from -1 to 1
        sampled = F.grid_sample(square, at, mode="bicubic", align_corners=False, padding_mode="border")
        return sampled[0, :, :, 0].T.to(weight.dtype)
