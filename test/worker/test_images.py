"""Requests with images in a worker. The oracle is transformers."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.media.layout import read_layout
from lightserve.media.sizes import ImageHeader
from lightserve.media.tokens import expand, locate, room_for_tokens
from lightserve.messages.int_arrays import NO_INT32, Int32Array, int32s, int64s
from lightserve.messages.media import ImageItem, ImageRows
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import resolve
from lightserve.vision.load import load_tower
from lightserve.vision.tower import ImageTiles
from lightserve.worker.batch.images import positions_of, req_images
from lightserve.worker.worker import ModelWorker
from test.vision_model import END, PAD, START, greedy, oracle_inputs, picture, save_vision_model
from test.worker.test_draft_graphs import RerunGraphs, graphs

__all__ = ["graphs"]  # a fixture

IMAGES = [picture(90, 200, 1), picture(150, 60, 2)]
PROMPT = [1, 5, START, PAD, END, 7, 8, START, PAD, END, 9, 2]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def vision_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


class Images:
    """Encodes into an arena, as the encoder process does."""

    def __init__(self, folder: str) -> None:
        self.memory = mmap.mmap(-1, 4096 * 64)
        source = resolve(folder)
        self._layout = read_layout(read_image_files(source), None)
        self._tower = load_tower(source, self._layout, True, torch.float32, torch.device("cpu"))
        values, width = torch.frombuffer(self.memory, dtype=torch.float32), self._tower.row_width
        self.arena = values[: len(values) // width * width].view(-1, width)
        self._rows = np.random.default_rng(0).permutation(len(self.arena)).astype(np.int32)

    def rows_of(self, image: Image.Image, start: int) -> ImageRows:
        size = self._layout.size_of(ImageHeader(*image.size))
        tiles = [torch.from_numpy(tile.copy()) for tile in self._layout.pixels(image, size.height, size.width)]
        rows, self._rows = self._rows[: size.tokens], self._rows[size.tokens :]
        (self.arena[torch.from_numpy(rows).long()],) = self._tower.encode([ImageTiles(tiles, size.height, size.width)])
        return ImageRows(((start, size.tokens),), size.rows, size.columns, rows)

    def request(self, req_id: int, images: list[Image.Image], prompt: list[int]) -> NewReq:
        """Enters with the images at their places."""
        sizes = [self._layout.size_of(ImageHeader(*image.size)) for image in images]
        counts = [size.tokens for size in sizes]
        ids = expand(prompt, PAD, counts)
        starts = locate(ids, PAD, counts)
        rows = [self.rows_of(image, start) for image, start in zip(images, starts, strict=True)]
        return NewReq(req_id, int32s(ids), SamplingParams(temperature=0.0), 0, images=rows)


def worker_of(folder: str, memory: mmap.mmap) -> ModelWorker:
    config = WorkerConfig(model_dir=folder, device="cpu", max_total_token_num=2000, running_max_req_size=4)
    worker = ModelWorker(config, resolve(folder), Parallel())
    worker.enable_images(memory)
    return worker


def slots(begin: int, count: int) -> Int32Array:
    return np.arange(begin, begin + count, dtype=np.int32)


def generate(worker: ModelWorker, new: NewReq, chunk: int, count: int, first_slot: int = 0) -> list[int]:
    """Computes the prompt in chunks."""
    length, done = len(new.token_ids), new.num_cached
    out: list[int] = []
    while done < length:
        size = min(chunk, length - done)
        row = StepRow(new.req_id, slots(first_slot + done, size))
        result = worker.run(Step([row], new=[new] if done == new.num_cached else []))
        done += size
        out += [token.token.id for token in result.tokens]
    for at in range(count - 1):
        decode = Step([], decode_ids=int64s([new.req_id]), decode_slots=slots(first_slot + length + at, 1))
        out += [token.token.id for token in worker.run(decode).tokens]
    return out


def test_positions_are_those_of_transformers(vision_model: tuple[str, Any]) -> None:
    folder, model = vision_model
    inputs = oracle_inputs(PROMPT, IMAGES, model.config.model_type)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")

    expected, delta = model.model.get_rope_index(**{name: inputs[name] for name in names})
    new = Images(folder).request(1, IMAGES, PROMPT)
    positions = positions_of(new.images)
    tail = positions.shape[1]

    assert positions.tolist() == expected[:, 0, :tail].tolist()
    assert (positions.max() + 1 - tail) == delta.item()


def test_the_tokens_of_a_video_have_one_place_and_go_on_in_time() -> None:
    video = ImageRows(((1, 2), (3, 2), (5, 2)), 1, 2, NO_INT32, times=(0, 4, 8))
    behind = ImageRows(((8, 2),), 1, 2, NO_INT32)

    time, row, column = positions_of([video, behind]).tolist()

    assert time == [0, 1, 1, 5, 5, 9, 9, 10, 11, 11]
    assert row == [0, *[1] * 6, 10, 11, 11]
    assert column == [0, *[1, 2] * 3, 10, 11, 12]


@pytest.mark.parametrize("times", [(0, 4, 8), (0, 400, 800), ()])
def test_the_room_of_a_request_ends_where_its_rotary_positions_do(times: tuple[int, ...]) -> None:
    video = ImageItem(b"", ((1, 2), (3, 2), (5, 2)), 1, 2, 28, 56, PAD, times=times)
    image = ImageItem(b"", ((8, 6),), 2, 3, 56, 84, PAD)
    prompt_len, limit = 16, 2000

    room = room_for_tokens(limit, prompt_len, [video, image])

    rows = [ImageRows(item.spans, item.rows, item.columns, NO_INT32, item.times) for item in (video, image)]
    assert limit - room == max(req_images(rows).offset, 0)


@pytest.mark.parametrize("chunk", [500, 7, 1])
def test_text_after_images_is_that_of_transformers_with_chunks_anywhere(
    vision_model: tuple[str, Any], chunk: int
) -> None:
    folder, model = vision_model
    images = Images(folder)
    worker = worker_of(folder, images.memory)

    texts = [
        generate(worker, images.request(req, some, PROMPT), chunk, 6, 300 * req)
        for req, some in enumerate((IMAGES, IMAGES[::-1]))
    ]

    assert texts == [greedy(model, PROMPT, some, 6) for some in (IMAGES, IMAGES[::-1])]
    assert texts[0] != texts[1]


def test_text_follows_a_cached_prefix_that_ends_anywhere(vision_model: tuple[str, Any]) -> None:
    folder, model = vision_model
    images = Images(folder)
    worker, expected = worker_of(folder, images.memory), greedy(model, PROMPT, IMAGES, 4)
    new = images.request(0, IMAGES, PROMPT)
    length = len(new.token_ids)
    generate(worker, new, 500, 1)
    worker.run(Step([], free=[0]))

    for cached in range(1, length, 5):
        again = NewReq(
            cached, new.token_ids, new.sampling, 0, cached_slots=slots(0, cached), images=_uncached(new, cached)
        )

        assert generate(worker, again, 500, 4) == expected, cached
        worker.run(Step([], free=[cached]))


@pytest.mark.parametrize("chunk", [60, 7])
def test_captured_steps_compute_images(
    vision_model: tuple[str, Any],
    chunk: int,
    graphs: list[RerunGraphs],
) -> None:
    folder, model = vision_model
    images = Images(folder)
    worker = worker_of(folder, images.memory)
    worker.capture()
    text_only = NewReq(2, int32s([1, 2, 3, 4]), SamplingParams(temperature=0.0), 0)

    texts = [
        generate(worker, images.request(req, some, PROMPT), chunk, 5, 300 * req)
        for req, some in enumerate((IMAGES, IMAGES[::-1]))
    ]
    texts.append(generate(worker, text_only, 4, 5, 900))

    assert texts == [greedy(model, PROMPT, some, 5) for some in (IMAGES, IMAGES[::-1])] + [
        greedy(model, [1, 2, 3, 4], [], 5)
    ]
    (captured,) = graphs
    chunks = sum(-(-len(images.request(0, IMAGES, PROMPT).token_ids) // chunk) for _ in range(2)) + 1
    with_images = sum(count for shape, count in captured.replays.items() if shape.has_images)
    assert with_images == chunks
    assert captured.replays.total() == chunks + 3 * 4


def _uncached(new: NewReq, cached: int) -> list[ImageRows]:
    """Images whose KV is cached have no rows."""
    return [replace(image, arena_rows=NO_INT32) if sum(image.spans[0]) <= cached else image for image in new.images]


def test_a_request_without_images_in_the_same_row_has_plain_positions(vision_model: tuple[str, Any]) -> None:
    folder, model = vision_model
    images = Images(folder)
    worker = worker_of(folder, images.memory)
    generate(worker, images.request(0, IMAGES, PROMPT), 500, 2)
    worker.run(Step([], free=[0]))

    text = generate(worker, NewReq(1, int32s([1, 2, 3, 4]), SamplingParams(temperature=0.0), 0), 3, 5)

    assert text == greedy(model, [1, 2, 3, 4], [], 5)


@pytest.mark.parametrize("cached", [0, 20])
def test_text_goes_on_after_a_preemption(vision_model: tuple[str, Any], cached: int) -> None:
    folder, model = vision_model
    images = Images(folder)
    worker, expected = worker_of(folder, images.memory), greedy(model, PROMPT, IMAGES, 6)
    new = images.request(0, IMAGES, PROMPT)
    begun = generate(worker, new, 500, 3)
    worker.run(Step([], free=[0]))

    known = np.concatenate((new.token_ids, int32s(begun)))
    again = replace(new, token_ids=known, output_len=len(begun), cached_slots=slots(0, cached))

    assert begun + generate(worker, again, 9, 3, first_slot=0) == expected
