"""The tower of Qwen3-VL and Qwen3.5. The oracle is transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from lightserve.media.layouts.qwen import QwenImages
from lightserve.media.sizes import ImageHeader
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.families.qwen3 import Qwen3Tower
from lightserve.vision.tower import ImageTiles
from test.vision_model import QWEN3_FILES, VISION

TOWERS: dict[str, Any] = {"qwen3_vl": Qwen3VLVisionModel, "qwen3_5": Qwen3_5VisionModel}
SIZES = [(30, 30), (90, 200), (301, 140), (640, 480), (57, 1000)]


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def files_of(model_type: str) -> ImageFiles:
    return ImageFiles(model_type, QWEN3_FILES, {"vision_config": VISION[model_type]})


def oracle_tower(model_type: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, vision_config=VISION[model_type]).vision_config
    tower = TOWERS[model_type]._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return tower


@pytest.mark.parametrize("model_type", TOWERS)
def test_pixels_and_vectors_are_those_of_transformers_in_any_batch(model_type: str) -> None:
    oracle, layout = oracle_tower(model_type), QwenImages.read(files_of(model_type), None)
    tower = Qwen3Tower.read(files_of(model_type), layout)
    tensors = oracle.state_dict()
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].flatten(1)
    tower.load_state_dict(tensors)
    images = [picture(*size) for size in SIZES]
    values = Qwen2VLImageProcessorPil(**QWEN3_FILES)(images, return_tensors="pt")

    with torch.no_grad():
        out = oracle(values["pixel_values"], grid_thw=values["image_grid_thw"])
    expected = torch.cat([out.pooler_output, *getattr(out, "deepstack_features", ())], dim=1)
    sizes = [layout.size_of(ImageHeader(*size)) for size in SIZES]
    tiles = [
        ImageTiles(
            [torch.tensor(tile) for tile in layout.pixels(image, size.height, size.width)], size.height, size.width
        )
        for image, size in zip(images, sizes, strict=True)
    ]
    together = torch.cat(list(tower.encode(tiles)))
    alone = torch.cat([tower.encode([tile])[0] for tile in tiles])

    assert values["image_grid_thw"].tolist() == [[1, 2 * size.rows, 2 * size.columns] for size in sizes]
    torch.testing.assert_close(together, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
