"""Images whose tokens have text between them, in a worker. The oracle is transformers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from tokenizers import Tokenizer

from lightserve.media.layout import read_layout
from lightserve.media.reader import ImageReader
from lightserve.media.sizes import ImageHeader
from lightserve.media.sources import ReadImage
from lightserve.messages.int_arrays import NO_INT32, int32s
from lightserve.messages.media import ImageRows
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import resolve
from lightserve.vision.load import load_tower
from lightserve.vision.tower import ImageTiles
from lightserve.worker.worker import ModelWorker
from test.tiled_model import IMAGE, PLACEHOLDER, greedy, save_tiled_model
from test.vision_model import picture
from test.worker.test_images import generate, slots, worker_of

Prompt = Sequence[int | Image.Image]
IMAGES = [picture(90, 200, 1), picture(60, 60, 2)]
PROMPT: Prompt = [1, 5, IMAGES[0], 7, 8, IMAGES[1], IMAGES[0], 9, 2]


class Tiled(NamedTuple):
    folder: str
    model: Any
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=["smolvlm", "idefics3"])
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiled:
    return Tiled(*save_tiled_model(tmp_path_factory.mktemp(request.param), request.param))


class Images:
    """Encodes into an arena, as the encoder process does."""

    def __init__(self, tiled: Tiled) -> None:
        self.memory = mmap.mmap(-1, 4096 * 64)
        source = resolve(tiled.folder)
        self._tokenizer = tiled.tokenizer
        self._layout = read_layout(read_image_files(source), None)
        self._tower = load_tower(source, self._layout, True, torch.float32, torch.device("cpu"))
        self._reader = ImageReader(self._layout, PLACEHOLDER, IMAGE, {"image": 16}, 10**6)
        values, width = torch.frombuffer(self.memory, dtype=torch.float32), self._tower.row_width
        self._arena = values[: len(values) // width * width].view(-1, width)
        self._rows = np.random.default_rng(0).permutation(len(self._arena)).astype(np.int32)

    def request(self, req_id: int, prompt: Prompt) -> NewReq:
        images = [part for part in prompt if isinstance(part, Image.Image)]
        read = [ReadImage(b"", self._layout.size_of(ImageHeader(*image.size)), b"") for image in images]
        text = " ".join(f"w{part}" if isinstance(part, int) else IMAGE for part in prompt)
        ids = self._reader.expand(self._tokenizer.encode(self._reader.write(text, read)).ids, read)
        items = self._reader.locate(ids, read)
        rows = [
            ImageRows(item.spans, item.rows, item.columns, self._encode(image, item.height, item.width))
            for item, image in zip(items, images, strict=True)
        ]
        return NewReq(req_id, int32s(ids), SamplingParams(temperature=0.0), 0, images=rows)

    def _encode(self, image: Image.Image, height: int, width: int) -> np.ndarray:
        tiles = [torch.tensor(tile) for tile in self._layout.pixels(image, height, width)]
        (embeddings,) = self._tower.encode([ImageTiles(tiles, height, width)])
        rows, self._rows = self._rows[: len(embeddings)], self._rows[len(embeddings) :]
        self._arena[torch.from_numpy(rows).long()] = embeddings
        return rows


def worker_with_images(tiled: Tiled) -> tuple[Images, ModelWorker]:
    images = Images(tiled)
    return images, worker_of(tiled.folder, images.memory)


@pytest.mark.parametrize("chunk", [500, 7, 1])
def test_text_is_that_of_transformers_with_chunks_anywhere(tiled: Tiled, chunk: int) -> None:
    images, worker = worker_with_images(tiled)
    expected, prompt_ids = greedy(tiled.model, tiled.tokenizer, PROMPT, 6)

    new = images.request(0, PROMPT)

    assert int32s(new.token_ids).tolist() == prompt_ids
    assert generate(worker, new, chunk, 6) == expected


def test_text_follows_a_cached_prefix_that_ends_anywhere(tiled: Tiled) -> None:
    images, worker = worker_with_images(tiled)
    expected, prompt_ids = greedy(tiled.model, tiled.tokenizer, PROMPT, 4)
    new = images.request(0, PROMPT)
    generate(worker, new, 500, 1)
    worker.run(Step([], free=[0]))

    for cached in range(1, len(prompt_ids), 7):
        rows = [replace(item, arena_rows=NO_INT32) if sum(item.spans[-1]) <= cached else item for item in new.images]
        again = replace(new, req_id=cached, cached_slots=slots(0, cached), images=rows)

        assert generate(worker, again, 500, 4) == expected, cached
        worker.run(Step([], free=[cached]))


def test_other_images_give_another_text(tiled: Tiled) -> None:
    images, worker = worker_with_images(tiled)
    other: Prompt = [1, 5, IMAGES[1], 7, 8, IMAGES[0], IMAGES[1], 9, 2]

    texts = [generate(worker, images.request(i, prompt), 500, 6, 700 * i) for i, prompt in enumerate((PROMPT, other))]

    assert texts[0] != texts[1]
    assert texts[1] == greedy(tiled.model, tiled.tokenizer, other, 6)[0]
