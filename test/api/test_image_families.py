"""Images through real servers, of models that differ from Qwen2.5-VL. The oracle is transformers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from test import tiled_model
from test.api.image_chats import NEW_TOKENS, ask, expected, user
from test.api.server import ServerProcess, running_server
from test.vision_model import picture, png, save_vision_model

Prompt = Sequence[int | Image.Image]


class Served(NamedTuple):
    server: ServerProcess
    place: str  # of an image in a prompt
    expected: Callable[[Prompt], str]


def save_qwen(folder: Path, model_type: str) -> tuple[str, Callable[[Prompt], str]]:
    path, model = save_vision_model(folder, model_type)
    return path, lambda prompt: expected(model, prompt)


def save_tiled(folder: Path, model_type: str) -> tuple[str, Callable[[Prompt], str]]:
    path, model, tokenizer = tiled_model.save_tiled_model(folder, model_type)

    def text_of(prompt: Prompt) -> str:
        ids = tiled_model.greedy(model, tokenizer, prompt, NEW_TOKENS)[0]
        return " ".join(f"w{token_id}" for token_id in ids if token_id < tiled_model.WORDS)  # others have no text

    return path, text_of


SAVE: dict[str, Callable[[Path, str], tuple[str, Callable[[Prompt], str]]]] = {
    "smolvlm": save_tiled,
    "qwen3_5_moe": save_qwen,
    "qwen3_vl_moe": save_qwen,
}
FLAGS = {"qwen3_vl_moe": ("--tp", "2")}


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_5_moe", pytest.param("qwen3_vl_moe", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path, text_of = SAVE[request.param](tmp_path_factory.mktemp(request.param), request.param)
    flags = (
        *FLAGS.get(request.param, ()),
        "--model_dir",
        path,
        "--device",
        "cpu",
        "--max_total_token_num",
        "2000",
        "--embed_cache_gb",
        "0.01",
    )
    with running_server(tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield Served(
            server, "<image>" if SAVE[request.param] is save_tiled else "<|vision_start|><|vision_end|>", text_of
        )


def test_text_after_images_is_that_of_transformers(served: Served) -> None:
    first, second = picture(91, 203, 1), picture(157, 60, 2)

    text, usage = ask(served.server, [user("w5", first, "w7 w8", second, "w9")])

    assert text == served.expected([1, 5, first, 7, 8, second, 9, 2])
    assert usage["prompt_tokens_details"]["image_tokens"] > 10


def test_later_turns_take_the_image_from_the_prefix_cache(served: Served) -> None:
    image = picture(150, 140, 3)
    # recurrent layers keep no state before a prompt is so long
    chat = [user("w5 " * 30, image, "w6")]
    prompt: Prompt = [1, *[5] * 30, image, 6, 2]
    encoded = served.server.settled_metrics()["images_encoded_total"]
    cached = []

    for word in (9, 10, 11):
        text, usage = ask(served.server, chat)
        assert text == served.expected(prompt)
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        chat += [{"role": "assistant", "content": "w3"}, user(f"w{word}")]
        prompt = [*prompt[:-1], 1, 3, 1, word, 2]

    assert cached[1] > 45  # of the image too
    assert cached[2] >= cached[1]
    assert served.server.settled_metrics()["images_encoded_total"] == encoded + 1


def test_images_that_share_no_tokens_share_no_cache(served: Served) -> None:
    texts = []
    for seed in (4, 5):
        image = picture(120, 120, seed)
        text, usage = ask(served.server, [user("w5 w5 w5", image, "w6")])
        texts.append(text)

        assert text == served.expected([1, 5, 5, 5, image, 6, 2])
        assert usage["prompt_tokens_details"]["cached_tokens"] < 10


def test_prompts_of_generate_have_the_text_of_chats(served: Served) -> None:
    image = picture(91, 203, 6)
    data = base64.b64encode(png(image)).decode()
    wanted = served.expected([1, 5, image, 6, 2])
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    lightllm = {"inputs": f"w1 w5 {served.place} w6 w2", "parameters": parameters}
    inputs = f"w1 w5 ![](data:image/png;base64,{data}) w6 w2"
    tgi = {"inputs": inputs, "parameters": {"max_new_tokens": NEW_TOKENS, "ignore_eos_token": True}}

    _, response = served.server.post(
        "/generate", {**lightllm, "multimodal_params": {"images": [{"type": "base64", "data": data}]}}
    )
    _, of_tgi = served.server.post("/generate", tgi)

    assert response["generated_text"] == [wanted]
    assert of_tgi["generated_text"] == wanted
