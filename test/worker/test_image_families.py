"""Requests with images in a worker, from the text of a chat to its output, for other families than Qwen's.

The oracle is transformers.
"""

from __future__ import annotations

import asyncio
import base64
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.media.layout import read_layout
from lightserve.media.reader import MB, ImageReader
from lightserve.media.sources import ImageSource, ReadImage
from lightserve.messages.int_arrays import NO_INT32, Int32Array, int32s, int64s
from lightserve.messages.media import ImageItem, ImageRows, Sight
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.config.images import placeholder_of, read_image_files, sight_of
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer_or_none
from lightserve.router.images.sight import PromptSight
from lightserve.vision.load import load_tower
from lightserve.vision.tower import ImageTiles
from lightserve.worker.worker import ModelWorker
from test.vision_families import FAMILIES, PAD, greedy, save_family
from test.vision_model import picture, png

IMAGES = [picture(90, 200, 1), picture(150, 60, 2)]
PROMPT = [1, 5, PAD, 7, 8, PAD, 9, 2]
ONE_IMAGE = [1, 5, PAD, 9, 2]
USUAL = ("llava_onevision", "internvl", "mistral3", "gemma3", "gemma4", "glm4v", "paligemma", "paligemma2")
# the others differ in their tower and text model alone, which have tests of their own
RECURRENT = ("lfm2_vl",)  # whose steps have states too: see test/api/test_image_models.py
SERVED = [
    name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in RECURRENT
]


class Served:
    """A family's model, with what the processes of a server do for a prompt."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.model = save_family(folder, name)
        source = resolve(str(folder))
        files = read_image_files(source)
        layout = read_layout(files, None)
        tokenizer = load_tokenizer_or_none(source, None)
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._reader = ImageReader(layout, placeholder_of(source), FAMILIES[name].special[1], {"image": 9}, MB)
        self._layout = layout
        self._tower = load_tower(source, layout, True, torch.float32, torch.device("cpu"))
        self._memory = mmap.mmap(-1, 4096 * 64)
        values, width = torch.frombuffer(self._memory, dtype=torch.float32), self._tower.row_width
        self._arena = values[: len(values) // width * width].view(-1, width)
        self._used = 0
        config = WorkerConfig(model_dir=str(folder), device="cpu", max_total_token_num=2000, running_max_req_size=4)
        self.worker = ModelWorker(config, source, Parallel())
        self.worker.enable_images(self._memory)
        self.sight = PromptSight(sight_of(files.hf))
        self.boundaries = self.sight.boundaries(0, []) if self.sight.sight is not Sight.PROMPT else None

    def request(self, req_id: int, prompt: Sequence[int], images: Sequence[Image.Image]) -> NewReq:
        """``prompt`` has PAD once for each image."""
        urls = ["data:image/png;base64," + base64.b64encode(png(image)).decode() for image in images]
        read = asyncio.run(self._reader.read_all([ImageSource(url) for url in urls], ""))
        text = " ".join(FAMILIES[self.name].marker if each == PAD else f"w{each}" for each in prompt)
        written = self._reader.write(text, read)
        ids = self._reader.expand(self._tokenizer.encode(written, add_special_tokens=False), read)
        items = self._reader.locate(ids, read)
        self.boundaries = self.sight.boundaries(len(ids), items)
        rows = [self._rows_of(*each) for each in zip(items, read, images, strict=True)]
        return NewReq(req_id, int32s(ids), SamplingParams(temperature=0.0), 0, images=rows)

    def _rows_of(self, item: ImageItem, read: ReadImage, image: Image.Image) -> ImageRows:
        size = read.size
        tiles = [torch.from_numpy(tile.copy()) for tile in self._layout.pixels(image, size.height, size.width)]
        rows = np.arange(self._used, self._used + size.tokens, dtype=np.int32)
        self._used += size.tokens
        (self._arena[torch.from_numpy(rows).long()],) = self._tower.encode([ImageTiles(tiles, size.height, size.width)])
        return ImageRows(item.spans, item.rows, item.columns, rows)

    def generate(self, new: NewReq, chunk: int, count: int, first_slot: int = 0) -> list[int]:
        """Computes the prompt in chunks of so many tokens, as far as they divide no span."""
        length, done = len(new.token_ids), new.num_cached
        out: list[int] = []
        assert self.boundaries is not None
        while done < length:
            size = min(chunk, length - done)
            size = self.boundaries.longest_chunk(done, size) or self.boundaries.shortest_chunk(done)
            row = StepRow(new.req_id, slots(first_slot + done, size))
            result = self.worker.run(Step([row], new=[new] if done == new.num_cached else []))
            done += size
            out += [token.token.id for token in result.tokens]
        for at in range(count - 1):
            decode = Step([], decode_ids=int64s([new.req_id]), decode_slots=slots(first_slot + length + at, 1))
            out += [token.token.id for token in self.worker.run(decode).tokens]
        self.worker.run(Step([], free=[new.req_id]))
        return out


def slots(begin: int, count: int) -> Int32Array:
    return np.arange(begin, begin + count, dtype=np.int32)


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_text_after_images_is_that_of_transformers_with_chunks_anywhere(served: Served) -> None:
    for prompt, images in ((PROMPT, IMAGES), (ONE_IMAGE, IMAGES[:1]), (PROMPT, IMAGES[::-1])):
        expected = greedy(served.model, served.name, prompt, images, 6)
        for chunk in (500, 7, 1) if images is IMAGES else (500, 7):
            new = served.request(chunk, prompt, images)

            assert served.generate(new, chunk, 6) == expected, (len(images), chunk)


def test_a_text_without_images_is_that_of_transformers(served: Served) -> None:
    prompt = [1, 2, 3, 4]
    new = served.request(1, prompt, [])

    assert served.generate(new, 3, 5) == greedy(served.model, served.name, prompt, [], 5)


def test_text_follows_a_cached_prefix_that_ends_anywhere(served: Served) -> None:
    expected = greedy(served.model, served.name, PROMPT, IMAGES, 3)
    new = served.request(0, PROMPT, IMAGES)
    served.generate(new, 500, 1)

    for cached in range(1, len(new.token_ids), 9):
        images = [replace(image, arena_rows=NO_INT32) if image.end <= cached else image for image in new.images]
        again = replace(new, req_id=cached, cached_slots=slots(0, cached), images=images)

        assert served.generate(again, 500, 3) == expected, cached


def test_text_goes_on_after_a_preemption(served: Served) -> None:
    expected = greedy(served.model, served.name, ONE_IMAGE, IMAGES[:1], 6)
    new = served.request(0, ONE_IMAGE, IMAGES[:1])
    begun = served.generate(new, 500, 3)

    known = np.concatenate((new.token_ids, int32s(begun)))
    again: Any = replace(new, token_ids=known, output_len=len(begun))

    assert begun + served.generate(again, 9, 3) == expected


@pytest.mark.parametrize("name", ["gemma3", "gemma4-experts", "paligemma"])
def test_tokens_see_later_ones(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path)
    new = served.request(0, ONE_IMAGE, IMAGES[:1])
    seeing = served.generate(new, 500, 12)
    assert served.worker._batch.images is not None
    served.worker._batch.images.sight = Sight.NONE

    causal = served.generate(new, 500, 12)

    assert seeing != causal
