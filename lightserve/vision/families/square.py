"""Towers that compute squares of one size by CLIP or SigLIP, and a projector behind them: LLaVA, Gemma 3, PaliGemma."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.square import SquareImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.families.pixtral import PixtralTower
from lightserve.vision.tower import ImageTiles, LinearProjector, VisionTower, split_rows
from lightserve.vision.vit import CLIP, SIGLIP, Vit, VitConfig, activation, patches_of

PARTS = ("vision_tower.", "multi_modal_projector.", "image_newline")
# of towers, but not read: the pooling head of SigLIP, and buffers that older files hold
UNUSED = ("vision_tower.head.", "vision_tower.embeddings.position_ids")
LAYER_NAME = re.compile(r"vision_tower\.encoder\.layers\.(\d+)\.")


class Colors(Protocol):
    @property
    def mean(self) -> tuple[float, ...]: ...

    @property
    def std(self) -> tuple[float, ...]: ...


class VitTower(VisionTower):
    prefixes = PARTS

    def __init__(self, vit: Vit, layout: Colors) -> None:
        super().__init__()
        self.vision_tower = vit
        self._mean, self._std = layout.mean, layout.std

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        if not name.startswith(PARTS):
            return None
        name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
        layers: nn.ModuleList = self.vision_tower.encoder["layers"]  # type: ignore[assignment]
        number = LAYER_NAME.match(name)
        is_unused = name.startswith(UNUSED) or (number is not None and int(number[1]) >= len(layers))
        if name.startswith("vision_tower.post_layernorm.") and not hasattr(self.vision_tower, "post_layernorm"):
            return None
        return None if is_unused else name

    def features(self, images: Sequence[ImageTiles]) -> Tensor:
        """``[tiles, tokens, size]`` of all images."""
        tiles = torch.stack(list(chain.from_iterable(image.tiles for image in images)))
        patches = patches_of(tiles, self.vision_tower.config.patch, self._mean, self._std)
        out: Tensor = self.vision_tower(patches.to(self.vision_tower.embeddings.patch_embedding.weight.dtype))
        return out


class LlavaProjector(nn.Module):
    def __init__(self, size: int, out_size: int, activation_name: str, has_bias: bool) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(size, out_size, bias=has_bias)
        self.linear_2 = nn.Linear(out_size, out_size, bias=has_bias)
        self._activation = activation(activation_name)

    @property
    def out_size(self) -> int:
        return self.linear_2.out_features

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self._activation(self.linear_1(x)))
        return out


def llava_parts(files: ImageFiles, default_type: str, default_layer: int) -> tuple[Vit, LlavaProjector, bool]:
    """The last value: whether the first feature of a square, which is that of the class token, is left out."""
    hf = files.hf
    config = VitConfig.read(files.vision, default_type)
    layers = hf.get("vision_feature_layer", default_layer)
    counts = [config.layers_before(layer) for layer in (layers if isinstance(layers, list) else [layers])]
    projector = LlavaProjector(
        config.size * len(counts),
        files.text_size,
        hf.get("projector_hidden_act", "gelu"),
        hf.get("multimodal_projector_bias", True),
    )
    return Vit(config, counts), projector, hf.get("vision_feature_select_strategy", "default") == "default"


class LlavaTower(VitTower):
    def __init__(self, vit: Vit, projector: LlavaProjector, drops_first: bool, layout: Colors) -> None:
        super().__init__(vit, layout)
        self.multi_modal_projector = projector
        self._drops_first = drops_first

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> VisionTower:
        if files.vision.get("model_type") == "pixtral":
            return PixtralTower.read(files, layout)
        assert isinstance(layout, SquareImages)
        return cls(*llava_parts(files, CLIP, -2), layout)

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.out_size

    def projected(self, images: Sequence[ImageTiles]) -> Tensor:
        """``[tiles, tokens, row_width]``"""
        features = self.features(images)
        out: Tensor = self.multi_modal_projector(features[:, 1:] if self._drops_first else features)
        return out

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        return split_tiles(self.projected(images))


class Gemma3Projector(nn.Module):
    """Means of neighbouring patches, an RMSNorm and a matrix."""

    def __init__(self, config: VitConfig, out_size: int, tokens_per_side: int) -> None:
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(torch.empty(config.size, out_size))
        self.mm_soft_emb_norm = nn.ParameterDict({"weight": nn.Parameter(torch.empty(config.size))})
        self._eps = config.eps
        self._side = config.image // config.patch
        self._pooled = self._side // tokens_per_side

    def forward(self, x: Tensor) -> Tensor:
        grid = x.transpose(1, 2).reshape(len(x), -1, self._side, self._side)
        means = F.avg_pool2d(grid, self._pooled, self._pooled).flatten(2).transpose(1, 2)
        wide = means.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        normed = wide * (1 + self.mm_soft_emb_norm["weight"].float())
        out: Tensor = normed.to(x.dtype) @ self.mm_input_projection_weight
        return out


class Gemma3Tower(VitTower):
    def __init__(self, vit: Vit, projector: Gemma3Projector, layout: Colors) -> None:
        super().__init__(vit, layout)
        self.multi_modal_projector = projector

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Gemma3Tower:
        assert isinstance(layout, SquareImages)
        config = VitConfig.read(files.vision, SIGLIP)
        projector = Gemma3Projector(config, files.text_size, round(layout.num_tokens**0.5))
        return cls(Vit(config, [config.layers], has_last_norm=True), projector, layout)

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.mm_input_projection_weight.shape[1]

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        rows = self.multi_modal_projector(self.features(images))
        return split_rows(rows.flatten(0, 1), [len(image.tiles) * rows.shape[1] for image in images])


class PaliGemmaTower(VitTower):
    def __init__(self, vit: Vit, out_size: int, layout: Colors) -> None:
        super().__init__(vit, layout)
        self.multi_modal_projector = LinearProjector(vit.config.size, out_size)

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> PaliGemmaTower:
        assert isinstance(layout, SquareImages)
        config = VitConfig.read(files.vision, SIGLIP)
        return cls(Vit(config, [config.layers], has_last_norm=True), files.text_size, layout)

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.out_size

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        return split_tiles(self.multi_modal_projector(self.features(images)))


def split_tiles(rows: Tensor) -> Sequence[Tensor]:
    """Of images with one tile each."""
    return [tile[0] for tile in split_rows(rows, [1] * len(rows))]
