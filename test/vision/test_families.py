"""Layouts and towers of the families that transformers has classes for. The oracle is transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightserve.errors import ModelFilesError
from lightserve.media.layout import ImageLayout, read_layout
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import pair_around, placeholder_of, read_image_files
from lightserve.model_files.source import resolve
from lightserve.vision.load import load_tower
from lightserve.vision.tower import ImageTiles
from test.vision_families import END, FAMILIES, PAD, START, features, save_family

SIZES = [(32, 32), (90, 200), (300, 140), (64, 47), (23, 111)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_family(folder, request.param)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def layout_of(folder: Path, max_tokens: int | None = None) -> ImageLayout:
    return read_layout(read_image_files(resolve(str(folder))), max_tokens)


def decoded(layout: ImageLayout, image: Image.Image, is_low: bool = False) -> tuple[ImageTiles, ImageSize]:
    size = layout.size_of(ImageHeader(*image.size), is_low)
    tiles = [torch.tensor(tile) for tile in layout.pixels(image, size.height, size.width)]
    return ImageTiles(tiles, size.height, size.width), size


def test_pixels_are_those_of_transformers(family: tuple[str, Path, Any]) -> None:
    name, folder, _ = family
    layout: Any = layout_of(folder)
    for number, shape in enumerate(SIZES):
        expected = FAMILIES[name].tiles([noise(*shape)])

        tiles = decoded(layout, noise(*shape))[0].tiles
        found = [(tile.float() / 255 - torch.tensor(layout.mean)) / torch.tensor(layout.std) for tile in tiles]

        assert [tile.shape for tile in found] == [tile.shape for tile in expected], (number, shape)
        for tile, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(tile, wanted, rtol=0, atol=FAMILIES[name].pixel_error)


def test_embeddings_are_those_of_transformers_in_any_batch(family: tuple[str, Path, Any]) -> None:
    name, folder, model = family
    layout = layout_of(folder)
    tower = load_tower(resolve(str(folder)), layout, True, torch.float32, torch.device("cpu"))
    images = [noise(*shape) for shape in SIZES]
    inputs, sizes = zip(*(decoded(layout, image) for image in images), strict=True)

    expected = [features(model, name, [image])[0] for image in images]
    together = tower.encode(inputs)
    alone = [tower.encode([each])[0] for each in inputs]

    assert [len(each) for each in expected] == [size.tokens for size in sizes]
    for found, single, wanted in zip(together, alone, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(single, found, rtol=0, atol=1e-5)


def test_every_size_has_as_many_tokens_as_its_tiles(family: tuple[str, Path, Any]) -> None:
    _, folder, _ = family
    layout = layout_of(folder)
    tower = load_tower(resolve(str(folder)), layout, False, torch.float32, torch.device("cpu"))
    for shape in [(1, 1), (1, 150), (199, 1), (7, 333), (1000, 90), (517, 519)]:
        image = Image.new("RGB", shape)
        for is_low in (False, True):
            tiles, size = decoded(layout, image, is_low)

            assert tower.encode([tiles])[0].shape == (size.tokens, tower.row_width), (shape, is_low)
            assert size.tokens <= layout.largest.tokens, (shape, is_low)
            assert len(size.texts) in (0, len(size.runs) + 1)


def test_the_largest_image_can_be_encoded(family: tuple[str, Path, Any]) -> None:
    """The encoder does it at its start."""
    _, folder, _ = family
    for max_tokens in (None, 40):
        layout = layout_of(folder, max_tokens)
        tower = load_tower(resolve(str(folder)), layout, False, torch.float32, torch.device("cpu"))
        largest = layout.largest
        tiles = [torch.tensor(tile) for tile in layout.blank()]

        (rows,) = tower.encode([ImageTiles(tiles, largest.height, largest.width)])

        assert len(rows) == largest.tokens
        assert max_tokens is None or largest.tokens <= max_tokens


def test_positions_of_images_have_axes_in_glm(tmp_path: Path) -> None:
    save_family(tmp_path, "glm4v")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["text_config"]["rope_parameters"]["mrope_section"]
    file.write_text(json.dumps(config))

    with pytest.raises(ModelFilesError, match="rope_parameters has no mrope_section"):
        layout_of(tmp_path)


def test_images_of_glm_stand_between_two_tokens(tmp_path: Path) -> None:
    """Clients of LightLLM may write these two alone."""
    save_family(tmp_path, "glm4v")

    assert pair_around(resolve(str(tmp_path))) == (START, END)


def test_files_of_kimi_are_read_as_published(tmp_path: Path) -> None:
    """The names of fields that transformers gives others when it saves them."""
    save_family(tmp_path, "kimi_k25")
    source = resolve(str(tmp_path))
    layout = layout_of(tmp_path)
    inputs = [decoded(layout, noise(*shape))[0] for shape in SIZES]
    expected = load_tower(source, layout, True, torch.float32, torch.device("cpu")).encode(inputs)
    config, files = (json.loads((tmp_path / name).read_text()) for name in ("config.json", "preprocessor_config.json"))
    vision = config["vision_config"]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        vision[f"vt_{name}"] = vision.pop(name)
    for name in ("pos_emb_height", "pos_emb_width"):
        vision[f"init_{name}"] = vision.pop(name)
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    limits = {"in_patch_limit": files.pop("max_patches"), "patch_limit_on_one_side": files.pop("size")["max_height"]}
    published = {"media_proc_cfg": {**files, **limits, "merge_kernel_size": 2, "fixed_output_tokens": None}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published))

    again = layout_of(tmp_path)
    found = load_tower(source, again, True, torch.float32, torch.device("cpu")).encode(inputs)

    assert again == layout
    assert placeholder_of(source) == PAD
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_llama4_enlarges_images_if_its_files_say_so(tmp_path: Path) -> None:
    save_family(tmp_path, "llama4")
    family = replace(FAMILIES["llama4"], files={**FAMILIES["llama4"].files, "resize_to_max_canvas": True})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(family.files))
    layout: Any = layout_of(tmp_path)

    for shape in SIZES:
        tiles = decoded(layout, noise(*shape))[0].tiles
        found = (torch.stack(list(tiles)).float() / 255 - torch.tensor(layout.mean)) / torch.tensor(layout.std)

        torch.testing.assert_close(found, torch.stack(family.tiles([noise(*shape)])), rtol=0, atol=family.pixel_error)
