"""Images through a real server on a CPU. The oracle is transformers."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from PIL import Image

from test.api.server import ServerProcess, running_server
from test.media.fetch.image_host import TLS, answer, image_host_in_thread
from test.vision_model import END, PAD, START, VOCAB_SIZE, greedy, picture, png, save_vision_model
from test.waiting import wait_until

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def vision_server(vision_model: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--model_dir", vision_model[0], "--device", "cpu", "--max_total_token_num", "2000")
    limits = ("--embed_cache_gb", "0.01", "--max_image_mb", "1", "--media_private_hosts", "localhost")
    with running_server(log, *flags, *limits, env={"SSL_CERT_FILE": str(TLS / "authority.pem")}) as server:
        yield server


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def part_of(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def user(*parts: str | Image.Image) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else part_of(each) for each in parts]
    return {"role": "user", "content": content}


def ask(server: ServerProcess, messages: Sequence[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    status, response = server.post("/v1/chat/completions", body)
    assert status == 200, response
    return response["choices"][0]["message"]["content"], response["usage"]


def expected(model: Any, prompt: Sequence[int | Image.Image]) -> str:
    """``prompt``: an image stands where it is."""
    ids = [token_id for each in prompt for token_id in ([each] if isinstance(each, int) else [START, PAD, END])]
    images = [each for each in prompt if not isinstance(each, int)]
    text = greedy(model, ids, images, NEW_TOKENS)
    return " ".join(f"w{token_id}" for token_id in text if token_id < VOCAB_SIZE)  # others have no text


def test_text_after_images_is_that_of_transformers(vision_server: ServerProcess, vision_model: tuple[str, Any]) -> None:
    first, second = picture(90, 200, 1), picture(150, 60, 2)

    text, usage = ask(vision_server, [user("w5", first, "w7 w8", second, "w9")])

    assert text == expected(vision_model[1], [1, 5, first, 7, 8, second, 9, 2])
    assert usage["prompt_tokens_details"]["image_tokens"] == 21 + 10
    assert usage["prompt_tokens"] == 10 + 21 + 10


def test_the_same_image_in_a_later_turn_is_taken_from_the_prefix_cache(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    image = picture(120, 120, 3)
    first = [user("w5 w6", image)]
    answer, usage = ask(vision_server, first)
    length = usage["prompt_tokens"]

    later = [*first, {"role": "assistant", "content": answer}, user("w9")]
    text, usage = ask(vision_server, later)

    answer_ids = [int(word[1:]) for word in answer.split()]
    assert text == expected(vision_model[1], [1, 5, 6, image, 1, *answer_ids, 1, 9, 2])
    assert usage["prompt_tokens_details"]["cached_tokens"] == length - 1  # all but w2, which begins the answer


def test_an_image_at_another_place_is_not_encoded_again(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    image = picture(140, 100, 4)
    ask(vision_server, [user(image)])
    before = vision_server.settled_metrics()

    text, _ = ask(vision_server, [user("w20 w21 w22", image)])

    after = vision_server.settled_metrics()
    assert text == expected(vision_model[1], [1, 20, 21, 22, image, 2])
    assert after["images_encoded_total"] == before["images_encoded_total"]


def test_choices_share_the_image(vision_server: ServerProcess, vision_model: tuple[str, Any]) -> None:
    image = picture(60, 90, 5)
    body = {"messages": [user(image, "w30")], "n": 3, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

    status, response = vision_server.post("/v1/chat/completions", body)

    assert status == 200, response
    texts = {choice["message"]["content"] for choice in response["choices"]}
    assert texts == {expected(vision_model[1], [1, image, 30, 2])}


def test_requests_go_on_when_the_encoder_and_the_worker_are_killed(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    for number, name in enumerate(("ls-encoder", "ls-worker", "ls-encoder")):
        (process,) = vision_server.processes()[name]
        os.kill(process.pid, signal.SIGKILL)
        image = picture(100, 64, 100 + number)

        text, _ = ask(vision_server, [user(image, "w31")])

        assert text == expected(vision_model[1], [1, image, 31, 2])


def refusal(server: ServerProcess, content: Any, **fields: Any) -> str:
    messages = [{"role": "user", "content": content}]
    status, response = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, **fields})
    assert status == 400, response
    message: str = response["error"]["message"]
    return message


def test_refusals_say_what_is_wrong(vision_server: ServerProcess) -> None:
    def of_url(url: str) -> str:
        return refusal(vision_server, [{"type": "image_url", "image_url": {"url": url}}])

    assert "https: URLs are read" in of_url("file:///etc/passwd")
    assert "(--allow_http_media allows both)" in of_url("http://127.0.0.1/a.png")
    assert "its host has no public address" in of_url("https://127.0.0.1/a.png")
    assert "not base64" in of_url("data:image/png;base64,@@@@")
    svg = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
    assert "not an image of a known format" in of_url(f"data:image/svg+xml;base64,{svg}")
    assert "more than 1 MB" in of_url("data:image/png;base64," + "A" * 1_400_000)
    assert "the limit is 16 (--limit_mm_per_prompt)" in refusal(vision_server, [part_of(picture(60, 60))] * 17)
    spelt = [part_of(picture(60, 60)), {"type": "text", "text": "<|image_pad|>"}]
    assert "spell the token" in refusal(vision_server, spelt)


def test_a_truncated_image_is_refused_and_the_next_one_is_read(vision_server: ServerProcess) -> None:
    file = png(Image.effect_noise((300, 300), 60))
    broken = base64.b64encode(file[: len(file) // 2]).decode()

    message = refusal(vision_server, [{"type": "image_url", "image_url": f"data:image/png;base64,{broken}"}])

    assert message == "the PNG image is damaged or incomplete; send it again"
    ask(vision_server, [user(picture(64, 64, 8))])


def test_nothing_waits_or_is_held_when_all_requests_have_ended(vision_server: ServerProcess) -> None:
    vision_server.wait_until_idle()

    wait_until(lambda: vision_server.metrics()["images_waiting"] == 0)


def test_the_same_image_by_every_schema_gives_one_text_and_is_encoded_once(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    image = picture(84, 112, 20)
    data = base64.b64encode(png(image)).decode()
    wanted = expected(vision_model[1], [1, image, 40, 2])
    before = vision_server.settled_metrics()["images_encoded_total"]

    text, usage = ask(vision_server, [user(image, "w40")])
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "w40"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS, "temperature": 0}
    _, anthropic = vision_server.post("/v1/messages", {**body, "ignore_eos": True})
    _, counted = vision_server.post("/v1/messages/count_tokens", body)
    options = {"num_predict": NEW_TOKENS, "temperature": 0}
    message = {"role": "user", "content": "w40", "images": [data]}
    shared = {"model": "vision0", "stream": False, "options": options, "ignore_eos": True}
    _, chat = vision_server.post("/api/chat", {**shared, "messages": [message]})
    _, generated = vision_server.post("/api/generate", {**shared, "prompt": "w40", "images": [data]})
    _, tokens = vision_server.post("/tokenize", {"messages": [user(image, "w40")]})
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    items = [{"role": "user", "content": [part, {"type": "input_text", "text": "w40"}]}]
    given = {"input": items, "max_output_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    _, response = vision_server.post("/v1/responses", given)

    assert text == wanted
    assert anthropic["content"][0]["text"] == wanted
    assert chat["message"]["content"] == wanted
    assert generated["response"] == wanted
    assert response["output"][0]["content"][0]["text"] == wanted
    assert counted["input_tokens"] == tokens["count"] == usage["prompt_tokens"]
    assert vision_server.settled_metrics()["images_encoded_total"] == before + 1


def test_an_image_of_another_server_is_fetched_once_for_a_request(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    image = picture(84, 112, 22)
    with image_host_in_thread(lambda target: answer(png(image))) as host:
        part = {"type": "image_url", "image_url": {"url": host.url()}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "w41"}, part]}]

        text, _ = ask(vision_server, messages)

    assert text == expected(vision_model[1], [1, image, 41, image, 2])
    assert len(host.heads) == 1


def test_why_an_image_was_not_fetched_is_told(vision_server: ServerProcess) -> None:
    def of_url(url: str) -> str:
        return refusal(vision_server, [part_of(picture(60, 60)), {"type": "image_url", "image_url": {"url": url}}])

    with image_host_in_thread(
        lambda target: answer(b"<html/>") if target == "/page" else answer(b"", status=404)
    ) as host:
        assert of_url(host.url("/none")) == "image 2 of the request: its server answered with status 404"
        assert "image 2 of the request: not an image of a known format" in of_url(host.url("/page"))
        assert "has no public address" in of_url("https://127.0.0.1:443/")


def test_an_image_in_a_tool_result_is_read(vision_server: ServerProcess, vision_model: tuple[str, Any]) -> None:
    image = picture(84, 84, 21)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(image)).decode()}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]

    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    status, response = vision_server.post("/v1/messages", body)

    assert status == 200, response
    assert response["usage"]["input_tokens"] + response["usage"].get("cache_read_input_tokens", 0) > 9
