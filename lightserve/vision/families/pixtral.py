"""The tower of Pixtral and Mistral 3: images of any size, rotary positions by row and column.

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
from lightserve.media.layouts.pixtral import PixtralImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, segment_attention
from lightserve.vision.rms_norm import RmsNorm
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows
from lightserve.vision.vit import COLORS, activation, patches_of

EPS = 1e-5
PARTS = ("vision_tower.", "multi_modal_projector.")
DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}
THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class PixtralVision:
    """``vision_config`` of config.json."""

    size: int
    inside: int
    layers: int
    heads: int
    patch: int
    activation: str
    theta: float

    @classmethod
    def read(cls, files: ImageFiles) -> PixtralVision:
        values = {**DEFAULTS, **files.vision}
        rope = values.get("rope_parameters") or {}
        layers = values["num_hidden_layers"]
        last = files.hf.get("vision_feature_layer", -1)
        return cls(
            values["hidden_size"],
            values["intermediate_size"],
            layers + 1 + last if last < 0 else last,
            values["num_attention_heads"],
            values["patch_size"],
            values["hidden_act"],
            float(rope.get("rope_theta") or values.get("rope_theta") or THETA),
        )


class PixtralAttention(nn.Module):
    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.size, config.size, bias=False)
        self.k_proj = nn.Linear(config.size, config.size, bias=False)
        self.v_proj = nn.Linear(config.size, config.size, bias=False)
        self.o_proj = nn.Linear(config.size, config.size, bias=False)
        self._heads = config.heads

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (self._heads, -1)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        ops.rotary(query, key, *angles)
        attended = segment_attention(query, key, value, segments)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class GatedMlp(nn.Module):
    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.size, config.inside, bias=False)
        self.up_proj = nn.Linear(config.size, config.inside, bias=False)
        self.down_proj = nn.Linear(config.inside, config.size, bias=False)
        self._activation = activation(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class PixtralLayer(nn.Module):
    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.size, EPS)
        self.attention = PixtralAttention(config)
        self.ffn_norm = RmsNorm(config.size, EPS)
        self.feed_forward = GatedMlp(config)

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, segments)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class PixtralVit(nn.Module):
    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.config = config
        self.patch_conv = nn.Linear(COLORS * config.patch**2, config.size, bias=False)
        self.ln_pre = RmsNorm(config.size, EPS)
        layers = nn.ModuleList([PixtralLayer(config) for _ in range(config.layers)])
        self.transformer = nn.ModuleDict({"layers": layers})

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """``[patches, size]`` of all images. ``grids``: rows and columns of patches of each."""
        x = self.ln_pre(self.patch_conv(patches))
        angles = self._angles(grids, x.device)
        segments = Segments([rows * columns for rows, columns in grids], x.device)
        layers: Any = self.transformer["layers"]
        for layer in layers:
            x = layer(x, angles, segments)
        out: Tensor = x
        return out

    def _angles(self, grids: Sequence[tuple[int, int]], device: torch.device) -> RotaryAngles:
        """Frequencies of rows and of columns take turns."""
        dim = self.config.size // self.config.heads
        frequencies = self.config.theta ** -(torch.arange(0, dim, 2, device=device).float() / dim)
        places = torch.cat([torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids])
        rows, columns = places.to(device).float().unbind(1)
        angles = torch.cat((rows[:, None] * frequencies[0::2], columns[:, None] * frequencies[1::2]), dim=-1)
        return RotaryAngles(angles.cos(), angles.sin())


class PixtralProjector(nn.Module):
    """Mistral 3 merges squares of patches to tokens; Pixtral does not."""

    def __init__(self, files: ImageFiles, size: int, merge: int) -> None:
        super().__init__()
        hf, is_mistral3 = files.hf, files.model_type == "mistral3"
        if is_mistral3:
            self.norm = RmsNorm(size, float((hf.get("text_config") or {}).get("rms_norm_eps", 1e-6)))
            self.patch_merger = nn.ModuleDict({"merging_layer": nn.Linear(size * merge**2, size, bias=False)})
        has_bias = bool(hf.get("multimodal_projector_bias", not is_mistral3))
        self.linear_1 = nn.Linear(size, files.text_size, bias=has_bias)
        self.linear_2 = nn.Linear(files.text_size, files.text_size, bias=has_bias)
        self._activation = activation(hf.get("projector_hidden_act", "gelu"))
        self._merges = is_mistral3
        self._side = merge

    def forward(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        if self._merges:
            images = split_rows(self.norm(x), [rows * columns for rows, columns in grids])
            squares = [_squares(of_image, *grid, self._side) for of_image, grid in zip(images, grids, strict=True)]
            x = self.patch_merger["merging_layer"](torch.cat(squares))
        out: Tensor = self.linear_2(self._activation(self.linear_1(x)))
        return out


def _squares(x: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """``[squares, size * side * side]``: of each channel the patches of the square."""
    grid = x.view(rows // side, side, columns // side, side, -1)
    return grid.permute(0, 2, 4, 1, 3).flatten(0, 1).flatten(1)


class PixtralTower(VisionTower):
    prefixes = PARTS

    def __init__(self, files: ImageFiles, layout: PixtralImages) -> None:
        super().__init__()
        config = PixtralVision.read(files)
        self.vision_tower = PixtralVit(config)
        self.multi_modal_projector = PixtralProjector(files, config.size, layout.merge)
        self._layout = layout

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> PixtralTower:
        assert isinstance(layout, PixtralImages)
        return cls(files, layout)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(PARTS) else None

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.linear_2.out_features

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        patch, layout = self._layout.patch, self._layout
        grids = [(image.height // patch, image.width // patch) for image in images]
        patches = torch.cat([patches_of(image.tiles[0][None], patch, layout.mean, layout.std)[0] for image in images])
        x = self.vision_tower(patches.to(self.vision_tower.patch_conv.weight.dtype), grids)
        rows = self.multi_modal_projector(x, grids)
        return split_rows(rows, [height * width // layout.merge**2 for height, width in grids])
