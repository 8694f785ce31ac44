"""The towers of Aya Vision and Command A Vision: SigLIP, and squares of its patches that become tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.errors import ModelFilesError
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.aya import AyaImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.families.internvl import merged_squares
from lightserve.vision.families.square import VitTower
from lightserve.vision.tower import ImageTiles, split_rows
from lightserve.vision.vit import SIGLIP, Vit, VitConfig

AYA = "aya_vision"  # model_type
COHERE_INSIDE = 36_864  # of the projector of Command A Vision, if the files do not say


class SwiGluProjector(nn.Module):
    def __init__(self, files: ImageFiles, size: int) -> None:
        super().__init__()
        hf, is_aya = files.hf, files.model_type == AYA
        inside = hf.get("alignment_intermediate_size", files.text_size if is_aya else COHERE_INSIDE)
        self.layernorm = nn.LayerNorm(size, eps=hf.get("adapter_layer_norm_eps", 1e-6)) if is_aya else nn.Identity()
        self.linear_1 = nn.Linear(size, inside)
        self.linear_2 = nn.Linear(inside // 2, files.text_size)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.linear_1(self.layernorm(x)).chunk(2, dim=-1)
        out: Tensor = self.linear_2(F.silu(gates) * values)
        return out


class AyaTower(VitTower):
    def __init__(self, vit: Vit, layout: AyaImages, files: ImageFiles) -> None:
        super().__init__(vit, layout)
        self._merge = int(files.hf.get("downsample_factor", 2))
        self.multi_modal_projector = SwiGluProjector(files, vit.config.size * self._merge**2)

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> AyaTower:
        assert isinstance(layout, AyaImages)
        config = VitConfig.read(files.vision, SIGLIP)
        if files.model_type != AYA:
            return cls(Vit(config, [config.layers], has_last_norm=True), layout, files)
        layer = files.hf.get("vision_feature_layer", -1)
        strategy = files.hf.get("vision_feature_select_strategy", "full")
        if not isinstance(layer, int) or strategy != "full":
            raise ModelFilesError(
                f"config.json: vision_feature_layer is {layer} and vision_feature_select_strategy {strategy!r}; "
                "all patches of one layer are served"
            )
        return cls(Vit(config, [config.layers_before(layer)]), layout, files)

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.linear_2.out_features

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        rows = self.multi_modal_projector(merged_squares(self.features(images), self._merge))
        of_images = split_rows(rows, [len(image.tiles) for image in images])
        return [of_image.flatten(0, 1) for of_image in of_images]
