"""The tower of InternVL: squares of one size, layers with scales, and squares of patches that become tokens.

Modules have the names of the checkpoint's tensors, in the format of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.errors import ModelFilesError
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.internvl import InternVLImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.rms_norm import RmsNorm
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows
from lightserve.vision.vit import COLORS, VitMlp, activation, patches_of

PARTS = ("vision_tower.", "multi_modal_projector.")
UNUSED = ("vision_tower.embeddings.mask_token",)
PROJECTOR_EPS = 1e-5
QK_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class InternVision:
    """``vision_config`` of config.json."""

    size: int
    inside: int
    layers: int
    heads: int
    image: int
    patch: int
    activation: str
    eps: float
    has_bias: bool  # of queries, keys and values
    norms_heads: bool  # an RMSNorm over all heads of queries and of keys
    has_rms_norms: bool
    has_last_norm: bool

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> InternVision:
        return cls(
            vision.get("hidden_size", 1024),
            vision.get("intermediate_size", 4096),
            vision.get("num_hidden_layers", 24),
            vision.get("num_attention_heads", 16),
            _side(vision.get("image_size", 448)),
            _side(vision.get("patch_size", 14)),
            vision.get("hidden_act", "gelu"),
            vision.get("layer_norm_eps", 1e-6),
            vision.get("attention_bias", False),
            vision.get("use_qk_norm", False),
            vision.get("norm_type", "layer_norm") == "rms_norm",
            not vision.get("use_mean_pooling", True),
        )

    def norm(self) -> nn.Module:
        return RmsNorm(self.size, self.eps) if self.has_rms_norms else nn.LayerNorm(self.size, eps=self.eps)


def _side(value: Any) -> int:
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1:
        raise ModelFilesError(f"config.json: vision_config has {value} where one number for both sides is served")
    return int(sides[0])


class InternEmbeddings(nn.Module):
    def __init__(self, config: InternVision) -> None:
        super().__init__()
        patches = (config.image // config.patch) ** 2
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.size))
        self.position_embeddings = nn.Parameter(torch.empty(1, patches + 1, config.size))
        self.patch_embeddings = nn.ModuleDict({"projection": nn.Linear(COLORS * config.patch**2, config.size)})

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch_embeddings["projection"](patches)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.position_embeddings


class InternAttention(nn.Module):
    def __init__(self, config: InternVision) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.size, config.size, bias=config.has_bias)
        self.k_proj = nn.Linear(config.size, config.size, bias=config.has_bias)
        self.v_proj = nn.Linear(config.size, config.size, bias=config.has_bias)
        self.projection_layer = nn.Linear(config.size, config.size)
        self.q_norm = RmsNorm(config.size, QK_EPS) if config.norms_heads else nn.Identity()
        self.k_norm = RmsNorm(config.size, QK_EPS) if config.norms_heads else nn.Identity()
        self._heads = config.heads

    def forward(self, x: Tensor) -> Tensor:
        values = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        query, key, value = (each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in values)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        out: Tensor = self.projection_layer(attended)
        return out


class InternLayer(nn.Module):
    def __init__(self, config: InternVision) -> None:
        super().__init__()
        self.layernorm_before = config.norm()
        self.attention = InternAttention(config)
        self.lambda_1 = nn.Parameter(torch.empty(config.size))
        self.layernorm_after = config.norm()
        self.mlp = VitMlp(config.size, config.inside, config.activation)
        self.lambda_2 = nn.Parameter(torch.empty(config.size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        out: Tensor = x + self.lambda_2 * self.mlp(self.layernorm_after(x))
        return out


class InternVit(nn.Module):
    def __init__(self, config: InternVision, layers: int, has_last_norm: bool) -> None:
        super().__init__()
        self.config = config
        self.embeddings = InternEmbeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList([InternLayer(config) for _ in range(layers)])})
        # always a LayerNorm
        self.layernorm = nn.LayerNorm(config.size, eps=config.eps) if has_last_norm else nn.Identity()

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embeddings(patches)
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = layer(x)
        out: Tensor = self.layernorm(x)
        return out


class InternProjector(nn.Module):
    def __init__(self, size: int, out_size: int, activation_name: str) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(size, eps=PROJECTOR_EPS)
        self.linear_1 = nn.Linear(size, out_size)
        self.linear_2 = nn.Linear(out_size, out_size)
        self._activation = activation(activation_name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self._activation(self.linear_1(self.layer_norm(x))))
        return out


class InternVLTower(VisionTower):
    prefixes = PARTS

    def __init__(self, files: ImageFiles, layout: InternVLImages) -> None:
        super().__init__()
        config = InternVision.read(files.vision)
        last = files.hf.get("vision_feature_layer", -1)
        if not isinstance(last, int):
            raise ModelFilesError(f"config.json: vision_feature_layer is {last}; one layer is served")
        layers = config.layers + 1 + last if last < 0 else last
        self._merge = round(1 / files.hf.get("downsample_ratio", 0.5))
        self._drops_first = files.hf.get("vision_feature_select_strategy", "default") == "default"
        self._layout = layout
        self.vision_tower = InternVit(config, layers, config.has_last_norm and last == -1)
        self.multi_modal_projector = InternProjector(
            config.size * self._merge**2, files.text_size, files.hf.get("projector_hidden_act", "gelu")
        )

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> InternVLTower:
        assert isinstance(layout, InternVLImages)
        return cls(files, layout)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(PARTS) and not name.startswith(UNUSED) else None

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.linear_2.out_features

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        tiles = torch.stack(list(chain.from_iterable(image.tiles for image in images)))
        patches = patches_of(tiles, self._layout.patch, self._layout.mean, self._layout.std)
        weight: Tensor = self.multi_modal_projector.linear_1.weight
        features = self.vision_tower(patches.to(weight.dtype))
        merged = merged_squares(features[:, 1:] if self._drops_first else features, self._merge)
        of_images = split_rows(self.multi_modal_projector(merged), [len(image.tiles) for image in images])
        return [of_image.flatten(0, 1) for of_image in of_images]


def merged_squares(x: Tensor, merge: int) -> Tensor:
    """``[tiles, squares, size * merge * merge]``: the patches of a square side by side, row by row of the square."""
    side = round(x.shape[1] ** 0.5)
    grid = x.view(len(x), side // merge, merge, side // merge, merge, -1)
    return grid.transpose(2, 3).flatten(3).flatten(1, 2)
