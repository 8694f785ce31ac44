"""The towers of Qwen2-VL and Qwen2.5-VL. The oracle is transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from lightserve.media.image_file import resized
from lightserve.media.layouts.qwen import BICUBIC, QwenImages
from lightserve.media.sizes import ImageHeader
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.families.qwen import QwenTower, QwenVision, patches_of

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
FILES = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 60, "image_mean": MEAN, "image_std": STD}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "num_heads": 2,
        "intermediate_size": 40,
        "fullatt_block_indexes": [1],
    },
}
TOWERS: dict[str, Any] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
}
SIZES = [(30, 30), (90, 200), (300, 140), (640, 480), (57, 1000)]


def oracle_tower(model_type: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, vision_config=VISION[model_type]).vision_config
    tower = TOWERS[model_type]._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return tower


def our_tower(model_type: str, oracle: Any) -> QwenTower:
    tower = QwenTower(QwenVision.read(files_of(model_type)), images_of(model_type))
    tensors = oracle.state_dict()
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].flatten(1)
    tower.load_state_dict(tensors)
    tower.pack()
    return tower.eval()


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def files_of(model_type: str) -> ImageFiles:
    return ImageFiles(model_type, FILES, {"vision_config": VISION[model_type]})


def images_of(model_type: str) -> QwenImages:
    return QwenImages.read(files_of(model_type), None)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(size: tuple[int, int]) -> None:
    images, image = images_of("qwen2_vl"), picture(*size)
    expected = Qwen2VLImageProcessorPil(**FILES)(image, return_tensors="pt")

    wanted = images.size_of(ImageHeader(*size))
    pixels = torch.from_numpy(resized(image, wanted.height, wanted.width, BICUBIC).copy())

    assert expected["image_grid_thw"].tolist() == [[1, 2 * wanted.rows, 2 * wanted.columns]]
    torch.testing.assert_close(patches_of([pixels], images, 2), expected["pixel_values"], rtol=0, atol=2e-6)


def test_every_size_has_the_tokens_that_transformers_counts() -> None:
    images, processor = images_of("qwen2_vl"), Qwen2VLImageProcessorPil(**FILES)
    for height in range(1, 2200, 97):
        for width in range(1, 2200, 89):
            if max(height, width) <= 200 * min(height, width):
                patches = processor.get_number_of_image_patches(height, width, {})

                assert images.size_of(ImageHeader(width, height)).tokens == patches // 4, (height, width)


def test_low_detail_is_at_most_512_by_512_pixels() -> None:
    images = QwenImages.read(
        ImageFiles("qwen2_vl", {**FILES, "max_pixels": 10**7}, {"vision_config": VISION["qwen2_vl"]}), None
    )
    for size in ((2000, 1500), (600, 400), (300, 300), (3000, 40)):
        low, high = (images.size_of(ImageHeader(*size), is_low) for is_low in (True, False))

        assert low.height * low.width <= 512 * 512
        assert low == high or high.height * high.width > 512 * 512


@pytest.mark.parametrize("model_type", VISION)
def test_embeddings_are_those_of_transformers_in_any_batch(model_type: str) -> None:
    oracle = oracle_tower(model_type)
    tower = our_tower(model_type, oracle)
    values = Qwen2VLImageProcessorPil(**FILES)([picture(*size) for size in SIZES], return_tensors="pt")
    grids = [(rows, columns) for _, rows, columns in values["image_grid_thw"].tolist()]

    with torch.no_grad():
        expected = oracle(values["pixel_values"], grid_thw=values["image_grid_thw"]).pooler_output
    together = tower(values["pixel_values"], grids)
    parts = values["pixel_values"].split([rows * columns for rows, columns in grids])
    alone = torch.cat([tower(part, [grid]) for part, grid in zip(parts, grids, strict=True)])

    torch.testing.assert_close(together, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)  # other sizes of products round differently
