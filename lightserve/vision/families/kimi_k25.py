"""The tower of Kimi K2.5 (MoonViT): images of any size, learned positions that are stretched over them, rotary ones.

Modules have the names of the checkpoint's tensors, as published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.common import ops
from lightserve.common.ops import RotaryAngles
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.kimi_k25 import KimiImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, packed_attention
from lightserve.vision.tower import ImageTiles, PackedPart, VisionTower, split_rows
from lightserve.vision.vit import COLORS, patches_of

PARTS = ("vision_tower.", "mm_projector.")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
}
PREFIX = re.compile("^(?:vt_|init_)")  # of names in published files
EPS = 1e-5
THETA = 10_000.0
Grid = tuple[int, int]  # patches: rows and columns


@dataclass(frozen=True, slots=True)
class KimiVision:
    """``vision_config`` of config.json, with the names of published files or those of transformers."""

    size: int
    inside: int
    layers: int
    heads: int
    positions: Grid  # learned
    eps: float  # of the projector
    out_size: int

    @classmethod
    def read(cls, files: ImageFiles) -> KimiVision:
        vision, hf = files.vision, files.hf
        values = {**DEFAULTS, **{PREFIX.sub("", name): value for name, value in vision.items()}}
        return cls(
            size=values["hidden_size"],
            inside=values["intermediate_size"],
            layers=values["num_hidden_layers"],
            heads=values["num_attention_heads"],
            positions=(values["pos_emb_height"], values["pos_emb_width"]),
            eps=float(vision.get("projector_ln_eps", hf.get("projection_layer_norm_eps", EPS))),
            out_size=files.text_size,
        )


class LearnedPositions(nn.Module):
    def __init__(self, config: KimiVision) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*config.positions, config.size))

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """Stretched over each image."""
        square = self.weight.permute(2, 0, 1)[None].float()
        stretched = {grid: F.interpolate(square, grid, mode="bicubic") for grid in set(grids)}
        return torch.cat([stretched[grid][0].flatten(1).T for grid in grids]).to(self.weight.dtype)


class KimiMlp(nn.Module):
    def __init__(self, config: KimiVision) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.size, config.inside)
        self.fc1 = nn.Linear(config.inside, config.size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc1(F.gelu(self.fc0(x), approximate="tanh"))
        return out


class KimiBlock(PackedPart):
    def __init__(self, config: KimiVision) -> None:
        super().__init__()
        self.norm0 = nn.LayerNorm(config.size, eps=EPS)
        self.wqkv = nn.Linear(config.size, 3 * config.size)
        self.wo = nn.Linear(config.size, config.size)
        self.norm1 = nn.LayerNorm(config.size, eps=EPS)
        self.mlp = KimiMlp(config)
        self._heads = config.heads

    def pack(self) -> None:
        """Pair the halves of a head, as ``ops.rotary`` does: files have neighbours as pairs."""
        for tensor in (self.wqkv.weight, self.wqkv.bias):
            heads = tensor.view(3, self._heads, -1, 2, *tensor.shape[1:])
            heads[:2] = heads[:2].transpose(2, 3).reshape(heads[:2].shape)

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        qkv = self.wqkv(self.norm0(x)).view(len(x), 3 * self._heads, -1)
        query, keys_and_values = qkv[:, : self._heads], qkv[:, self._heads :]
        ops.rotary(query, keys_and_values[:, : self._heads], *angles)
        x = x + self.wo(packed_attention(query, keys_and_values, segments).flatten(1))
        out: Tensor = x + self.mlp(self.norm1(x))
        return out


class KimiTower(VisionTower):
    prefixes = PARTS

    def __init__(self, config: KimiVision, layout: KimiImages) -> None:
        super().__init__()
        self.config = config
        self._layout = layout
        proj = nn.Linear(COLORS * layout.patch**2, config.size)
        blocks = nn.ModuleList([KimiBlock(config) for _ in range(config.layers)])
        inputs = config.size * layout.merge**2
        self.vision_tower = nn.ModuleDict(
            {
                "patch_embed": nn.ModuleDict({"proj": proj, "pos_emb": LearnedPositions(config)}),
                "encoder": nn.ModuleDict(
                    {"blocks": blocks, "final_layernorm": nn.LayerNorm(config.size, eps=EPS)},
                ),
            }
        )
        self.mm_projector = nn.ModuleDict(
            {
                "pre_norm": nn.LayerNorm(config.size, eps=config.eps),
                "proj": nn.Sequential(nn.Linear(inputs, inputs), nn.GELU(), nn.Linear(inputs, config.out_size)),
            }
        )

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> KimiTower:
        assert isinstance(layout, KimiImages)
        return cls(KimiVision.read(files), layout)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.", 1)  # of transformers 5.22
        return name if name.startswith(PARTS) else None

    @property
    def row_width(self) -> int:
        return self.config.out_size

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        layout, patch = self._layout, self._layout.patch
        grids = [(image.height // patch, image.width // patch) for image in images]
        patches = [patches_of(image.tiles[0][None], patch, layout.mean, layout.std)[0] for image in images]
        x = self._features(torch.cat(patches), grids)
        features = split_rows(self.mm_projector["pre_norm"](x), [len(each) for each in patches])
        squares = [self._squares(of_image, grid) for of_image, grid in zip(features, grids, strict=True)]
        rows = self.mm_projector["proj"](torch.cat(squares))
        return split_rows(rows, [len(each) for each in squares])

    def _features(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[patches, size]`` of all images."""
        embed: Any = self.vision_tower["patch_embed"]
        encoder: Any = self.vision_tower["encoder"]
        x = embed["proj"](patches.to(embed["proj"].weight.dtype)) + embed["pos_emb"](grids)
        angles = self._angles(grids, x.device)
        segments = Segments([rows * columns for rows, columns in grids], x.device)
        for block in encoder["blocks"]:
            x = block(x, angles, segments)
        out: Tensor = encoder["final_layernorm"](x)
        return out

    def _angles(self, grids: Sequence[Grid], device: torch.device) -> RotaryAngles:
        """Columns and rows take turns."""
        places = torch.cat([torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids])
        pairs = self.config.size // self.config.heads // 4
        frequencies = THETA ** -(torch.arange(pairs, device=device).float() / pairs)
        angles = (places.to(device).flip(1)[:, None] * frequencies[:, None]).flatten(1)
        return RotaryAngles(angles.cos(), angles.sin())

    def _squares(self, x: Tensor, grid: Grid) -> Tensor:
        """``[tokens, size * merge * merge]``: the patches of a token side by side, row by row."""
        merge = self._layout.merge
        squares = x.view(grid[0] // merge, merge, grid[1] // merge, merge, -1).transpose(1, 2)
        return squares.flatten(0, 1).flatten(1)
