"""The tower of Gemma 4: images of any ratio, learned and rotary positions by column and row, means of squares.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightserve.common import ops
from lightserve.common.ops import RotaryAngles
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.gemma4 import PATCH, Gemma4Images
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, axial_angles, segment_attention
from lightserve.vision.rms_norm import RmsNorm, rms_normed
from lightserve.vision.tower import ImageTiles, PackedPart, VisionTower, split_rows
from lightserve.vision.vit import COLORS, activation, normalised, pixel_patches

PARTS = ("vision_tower.", "embed_vision.")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "patch_size": PATCH,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}
THETA = 100.0
Grid = tuple[int, int]  # patches: rows and columns


@dataclass(frozen=True, slots=True)
class Gemma4Vision:
    """``vision_config`` of config.json."""

    size: int
    inside: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    eps: float
    theta: float
    patch: int
    positions: int  # of an axis
    clips: bool  # what linears read and what they compute
    standardizes: bool  # what becomes tokens
    out_size: int

    @classmethod
    def read(cls, files: ImageFiles) -> Gemma4Vision:
        values = {**DEFAULTS, **files.vision}
        rope = values.get("rope_parameters") or {}
        return cls(
            values["hidden_size"],
            values["intermediate_size"],
            values["num_hidden_layers"],
            values["num_attention_heads"],
            values["num_key_value_heads"],
            values["head_dim"],
            values["hidden_activation"],
            values["rms_norm_eps"],
            float(rope.get("rope_theta") or THETA),
            values["patch_size"],
            values["position_embedding_size"],
            bool(values["use_clipped_linears"]),
            bool(values["standardize"]),
            files.text_size,
        )


class PatchEmbedder(nn.Module):
    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.input_proj = nn.Linear(COLORS * config.patch**2, config.size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.positions, config.size))

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """``places``: the row and the column of each patch."""
        rows, columns = places.unbind(1)
        x = self.input_proj((2 * (patches - 0.5)).to(self.input_proj.weight.dtype))
        out: Tensor = x + (self.position_embedding_table[0][columns] + self.position_embedding_table[1][rows])
        return out


class ClippedLinear(nn.Module):
    def __init__(self, config: Gemma4Vision, size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out_size, bias=False)
        self._clips = config.clips
        if config.clips:
            self.input_min, self.input_max = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
            self.output_min, self.output_max = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        if self._clips:
            x = x.clamp(self.input_min, self.input_max)
        out: Tensor = self.linear(x)
        return out.clamp(self.output_min, self.output_max) if self._clips else out


class Gemma4Attention(PackedPart):
    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.q_proj = ClippedLinear(config, config.size, config.heads * config.head_dim)
        self.k_proj = ClippedLinear(config, config.size, config.kv_heads * config.head_dim)
        self.v_proj = ClippedLinear(config, config.size, config.kv_heads * config.head_dim)
        self.o_proj = ClippedLinear(config, config.heads * config.head_dim, config.size)
        self.q_norm = RmsNorm(config.head_dim, config.eps)
        self.k_norm = RmsNorm(config.head_dim, config.eps)
        self._config = config

    def pack(self) -> None:
        """Pair the halves of a head that rotate, as ``ops.rotary`` does: files rotate each half of a head alone."""
        quarters = torch.arange(self._config.head_dim).view(4, -1)[[0, 2, 1, 3]].flatten()
        for linear in (self.q_proj.linear, self.k_proj.linear):
            heads = linear.weight.view(-1, self._config.head_dim, self._config.size)
            linear.weight.copy_(heads[:, quarters].flatten(0, 1))
        for norm in (self.q_norm, self.k_norm):
            norm.weight.copy_(norm.weight[quarters])

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        config = self._config
        query, key, value = (
            linear(x).view(len(x), -1, config.head_dim) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = self.q_norm(query), self.k_norm(key), rms_normed(value, config.eps)
        ops.rotary(query, key, *angles)
        groups = config.heads // config.kv_heads
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        out: Tensor = self.o_proj(segment_attention(query, key, value, segments, scale=1.0).flatten(1))
        return out


class Gemma4Mlp(nn.Module):
    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.gate_proj = ClippedLinear(config, config.size, config.inside)
        self.up_proj = ClippedLinear(config, config.size, config.inside)
        self.down_proj = ClippedLinear(config, config.inside, config.size)
        self._activation = activation(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Gemma4Layer(nn.Module):
    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.size, config.eps)
        self.self_attn = Gemma4Attention(config)
        self.post_attention_layernorm = RmsNorm(config.size, config.eps)
        self.pre_feedforward_layernorm = RmsNorm(config.size, config.eps)
        self.mlp = Gemma4Mlp(config)
        self.post_feedforward_layernorm = RmsNorm(config.size, config.eps)

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), angles, segments)
        x = x + self.post_attention_layernorm(attended)
        out: Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return out


class Gemma4Vit(nn.Module):
    def __init__(self, config: Gemma4Vision, pooled: int) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        layers = nn.ModuleList([Gemma4Layer(config) for _ in range(config.layers)])
        self.encoder = nn.ModuleDict({"layers": layers})
        if config.standardizes:
            self.std_bias, self.std_scale = (nn.Parameter(torch.empty(config.size)) for _ in range(2))
        self._pooled = pooled

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[tokens, size]`` of all images."""
        config = self.config
        places = torch.cat([torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids])
        places = places.to(patches.device)
        counts = [rows * columns for rows, columns in grids]
        segments = Segments(counts, patches.device)
        angles = axial_angles(places[:, 1], places[:, 0], config.head_dim, config.theta)
        x = self.patch_embedder(patches, places)
        layers: Any = self.encoder["layers"]
        for layer in layers:
            x = layer(x, angles, segments)
        means = [self._means(of_image, grid) for of_image, grid in zip(split_rows(x, counts), grids, strict=True)]
        return self._standardized(torch.cat(means))

    def _means(self, x: Tensor, grid: Grid) -> Tensor:
        """Of the patches of each token."""
        side = self._pooled
        squares = x.view(grid[0] // side, side, grid[1] // side, side, -1)
        return squares.float().mean((1, 3)).flatten(0, 1).to(x.dtype)

    def _standardized(self, means: Tensor) -> Tensor:
        """In float32, since values are beyond those of float16 in between."""
        x: Tensor = means.float() * self.config.size**0.5
        if self.config.standardizes:
            x = (x - self.std_bias.float()) * self.std_scale.float()
        return x.to(means.dtype)


class Gemma4Tower(VisionTower):
    prefixes = PARTS

    def __init__(self, config: Gemma4Vision, layout: Gemma4Images) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = Gemma4Vit(config, layout.pooled)
        self.embed_vision = nn.ModuleDict({"embedding_projection": nn.Linear(config.size, config.out_size, bias=False)})
        self._layout = layout

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Gemma4Tower:
        assert isinstance(layout, Gemma4Images)
        return cls(Gemma4Vision.read(files), layout)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(PARTS) else None

    @property
    def row_width(self) -> int:
        return self.config.out_size

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        patch, layout = self._layout.patch, self._layout
        grids = [(image.height // patch, image.width // patch) for image in images]
        tiles = [normalised(image.tiles[0], layout.mean, layout.std) for image in images]
        x = self.vision_tower(torch.cat([pixel_patches(tile, patch) for tile in tiles]), grids)
        rows = self.embed_vision["embedding_projection"](rms_normed(x, self.config.eps))
        return split_rows(rows, [height * width // layout.pooled**2 for height, width in grids])
