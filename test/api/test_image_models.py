"""Images of other families than Qwen's through a real server on a CPU. The oracle is transformers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from PIL import Image

from test.api.server import ServerProcess, running_server
from test.vision_families import PAD, START, VOCAB_SIZE, greedy, save_family
from test.vision_model import picture, png

NEW_TOKENS = 6
# the others differ in their layout and tower alone: see test/worker/test_image_families.py
LONG = (
    "aya_vision",
    "cohere2_vision",
    "gemma4",
    "glm4v",
    "kimi_k25",
    "lfm2_vl",
    "llama4",
    "llava_onevision",
    "mistral3",
)
SERVED = ["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
Model = tuple[str, Any, ServerProcess]


def start(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp(name)
    model = save_family(folder, name)
    flags = ("--model_dir", str(folder), "--device", "cpu", "--max_total_token_num", "2000")
    # a span of an image is longer than the rest of most chunks
    limits = ("--embed_cache_gb", "0.01", "--chunked_prefill_size", "11", "--limit_mm_per_prompt", "image=16")
    with running_server(tmp_path_factory.mktemp("server") / "log", *flags, *limits) as server:
        yield name, model, server


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield from start(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield from start("paligemma", tmp_path_factory)


def part_of(each: str | Image.Image) -> dict[str, Any]:
    if isinstance(each, str):
        return {"type": "text", "text": each}
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(each)).decode()}}


def ask(server: ServerProcess, *parts: str | Image.Image) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": [part_of(each) for each in parts]}]
    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    status, response = server.post("/v1/chat/completions", body)
    assert status == 200, response
    return response["choices"][0]["message"]["content"], response["usage"]


def expected(model: Any, name: str, prompt: Sequence[int], images: Sequence[Image.Image]) -> str:
    text = greedy(model, name, prompt, images, NEW_TOKENS)
    return " ".join(f"w{token_id}" for token_id in text if token_id < VOCAB_SIZE)


def test_text_after_images_is_that_of_transformers(served: Model) -> None:
    name, model, server = served
    first, second = picture(90, 200, 1), picture(150, 60, 2)

    alone, usage = ask(server, "w5", first, "w9")
    both, _ = ask(server, "w5", first, "w7 w8", second, "w9")
    again, cached = ask(server, "w5", first, "w9")

    assert alone == again == expected(model, name, [1, 5, PAD, 9, 2], [first])
    assert both == expected(model, name, [1, 5, PAD, 7, 8, PAD, 9, 2], [first, second])
    assert cached["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.mark.long
def test_a_prompt_of_paligemma_sees_itself(paligemma: Model) -> None:
    name, model, server = paligemma
    first = picture(90, 200, 1)

    texts = [ask(server, "w5 w6", first)[0], ask(server, "w5 w6 w7", first)[0]]
    again, usage = ask(server, "w5 w6", first)

    assert texts[0] == again == expected(model, name, [PAD, START, 5, 6], [first])
    assert texts[1] == expected(model, name, [PAD, START, 5, 6, 7], [first])
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
