"""The tiles and the tower of SmolVLM and Idefics3. The oracle is transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from lightserve.errors import OptionError
from lightserve.media.layouts.tiles import TiledImages
from lightserve.media.sizes import ImageHeader
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.families.idefics3 import Idefics3Tower
from lightserve.vision.tower import ImageTiles
from test.tiled_model import FILES, IMAGE, TEXT, VISION, processed

PROCESSORS = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}
SIZES = [(31, 77), (100, 100), (97, 33), (640, 401), (20, 21), (3, 900), (1000, 7), (1, 1)]


def files_of(model_type: str = "smolvlm", vision: dict[str, Any] | None = None, **fields: Any) -> ImageFiles:
    hf = {"vision_config": vision or VISION, "scale_factor": 2, "hidden_size": TEXT["hidden_size"]}
    return ImageFiles(model_type, {**FILES, **fields}, hf)


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def tiles_of(layout: TiledImages, image: Image.Image) -> Tensor:
    size = layout.size_of(ImageHeader(*image.size))
    return torch.from_numpy(np.stack(layout.pixels(image, size.height, size.width)))


def encoder_input(layout: TiledImages, image: Image.Image) -> ImageTiles:
    return ImageTiles(list(tiles_of(layout, image)), image.height, image.width)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_tiles_and_their_texts_are_those_of_transformers(model_type: str, is_split: bool) -> None:
    layout = TiledImages.read(files_of(model_type, do_image_splitting=is_split), None)
    processor = PROCESSORS[model_type](**FILES, do_image_splitting=is_split)
    for size in SIZES:
        image = picture(*size)
        expected = processor(image, return_tensors="pt")["pixel_values"][0]

        tiles = tiles_of(layout, image)
        values = (tiles.float() / 255 - torch.tensor(layout.mean)) / torch.tensor(layout.std)

        torch.testing.assert_close(values.permute(0, 3, 1, 2), expected, rtol=0, atol=2e-6)
        wanted = layout.size_of(ImageHeader(*size))
        written = "".join(text + IMAGE * run for text, run in zip(wanted.texts, (*wanted.runs, 0), strict=True))
        assert written == processed([image], do_image_splitting=is_split)[1][0]


def test_every_size_has_the_tiles_of_transformers() -> None:
    layout, processor = TiledImages.read(files_of(), None), SmolVLMImageProcessorPil(**FILES)
    for height in range(1, 260, 17):
        for width in range(1, 260, 13):
            image = Image.new("RGB", (width, height))
            resized = processor.resize_for_vision_encoder(
                processor.resize(np.asarray(image).transpose(2, 0, 1), processor.size), layout.tile
            )
            tiles, rows, columns = processor.split_images(resized, {"longest_edge": layout.tile})

            size = layout.size_of(ImageHeader(width, height))

            assert len(size.runs) == len(tiles), (width, height)
            assert (size.height, size.width) == (max(rows, 1) * layout.tile, max(columns, 1) * layout.tile)


def test_fewer_tokens_are_fewer_tiles() -> None:
    whole, few = TiledImages.read(files_of(), None), TiledImages.read(files_of(), 20)

    assert whole.largest.tokens == (3 * 3 + 1) * 4
    assert few.largest.tokens == (2 * 2 + 1) * 4
    assert TiledImages.read(files_of(), 19).largest.tokens == 4
    assert whole.size_of(ImageHeader(500, 500), is_low=True).tokens == 4
    with pytest.raises(OptionError, match="a tile of an image has 4 tokens; raise it"):
        TiledImages.read(files_of(), 3)


def oracle_of(model_type: str, vision: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, text_config=TEXT, vision_config=vision, scale_factor=2, image_token_id=1)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


SHAPES = [
    (32, VISION),
    (72, {**VISION, "image_size": 104, "patch_size": 4}),  # 18 of 26 positions: rounding decides which a patch gets
    (38, {**VISION, "image_size": 38, "patch_size": 6}),  # patches do not fill a tile
]


@pytest.mark.parametrize(("tile", "vision"), SHAPES)
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_embeddings_are_those_of_transformers_in_any_batch(model_type: str, tile: int, vision: dict[str, Any]) -> None:
    oracle = oracle_of(model_type, vision)
    sides = {"size": {"longest_edge": 2 * tile}, "max_image_size": {"longest_edge": tile}}
    layout = TiledImages.read(files_of(model_type, vision, **sides), None)
    tower = Idefics3Tower.read(files_of(model_type, vision), layout)
    tensors = {f"model.{name}": tensor for name, tensor in oracle.model.state_dict().items()}
    names = {name: tower.own_name(name) for name in tensors}
    tower.load_state_dict(
        {
            own: tensors[name].flatten(1) if tensors[name].dim() > 2 else tensors[name]
            for name, own in names.items()
            if own
        }
    )
    images = [picture(90, 200), picture(150, 60), picture(20, 20)]
    processor = PROCESSORS[model_type](**{**FILES, **sides})

    expected = [
        torch.cat(oracle.model.get_image_features(**processor(image, return_tensors="pt")).pooler_output)
        for image in images
    ]
    together = tower.encode([encoder_input(layout, image) for image in images])
    alone = [tower.encode([encoder_input(layout, image)])[0] for image in images]

    for rows, single, wanted in zip(together, alone, expected, strict=True):
        torch.testing.assert_close(rows, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(single, rows, rtol=0, atol=1e-5)
