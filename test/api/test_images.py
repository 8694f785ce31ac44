"""Images through a real server on a CPU. The oracle is transformers."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from PIL import Image

from test.api.image_chats import NEW_TOKENS, ask, best_beams, data_url, expected, part_of, user
from test.api.server import ServerProcess, running_server
from test.media.fetch.image_host import TLS, answer, image_host_in_thread
from test.vision_model import END, PAD, START, picture, png, save_vision_model
from test.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def vision_server(vision_model: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--model_dir", vision_model[0], "--device", "cpu", "--max_total_token_num", "2000")
    limits = (
        "--embed_cache_gb",
        "0.01",
        "--max_image_mb",
        "1",
        "--media_private_hosts",
        "localhost",
        "--model_name",
        "vision",
    )
    with running_server(log, *flags, *limits, env={"SSL_CERT_FILE": str(TLS / "authority.pem")}) as server:
        yield server


def test_the_banner_shows_the_memory_of_images(vision_server: ServerProcess) -> None:
    assert re.search(
        r"images +up to 16 of a request; \S+ GiB of vision weights on cpu; embeddings of [\d,]+ tokens in 0.01 GiB",
        vision_server.log_path.read_text(),
    )


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


def test_a_chat_about_an_image_is_cached_as_a_chat_about_a_text(vision_server: ServerProcess) -> None:
    def cached_share(about: str | Image.Image) -> float:
        """Of the prompts of five turns."""
        messages = [user(about, "w50 w51")]
        cached = total = 0
        for turn in range(5):
            answer, usage = ask(vision_server, messages)
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
            messages += [{"role": "assistant", "content": answer}, user(f"w{60 + turn} w52")]
        return cached / total

    image = picture(140, 168, 30)  # 30 tokens between two
    text = " ".join(f"w{60 + number}" for number in range(32))

    of_image, of_text = cached_share(image), cached_share(text)

    assert of_text > 0.5
    assert abs(of_image - of_text) < 0.02


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
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert refusal(vision_server, [sound]) == "sound 1 of the request: this model reads no sounds"
    file = {"type": "file", "file": {"file_id": "1"}}
    assert refusal(vision_server, [file]) == "a message part of type 'file' is not supported yet"


def test_a_request_may_have_many_large_files(vision_server: ServerProcess) -> None:
    files = [png(picture(60, 60, seed)).ljust(10**6, b"\0") for seed in range(16)]
    parts = [{"type": "image_url", "image_url": f"data:;base64,{base64.b64encode(file).decode()}"} for file in files]

    _, usage = ask(vision_server, [{"role": "user", "content": parts}])

    assert usage["prompt_tokens_details"]["image_tokens"] == 16 * 4


def test_a_truncated_image_is_refused_and_the_next_one_is_read(vision_server: ServerProcess) -> None:
    file = png(Image.effect_noise((300, 300), 60))
    broken = base64.b64encode(file[: len(file) // 2]).decode()

    message = refusal(vision_server, [{"type": "image_url", "image_url": f"data:image/png;base64,{broken}"}])

    assert message == "the PNG image is damaged or incomplete; send it again"
    ask(vision_server, [user(picture(64, 64, 8))])


def test_nothing_waits_or_is_held_when_all_requests_have_ended(vision_server: ServerProcess) -> None:
    vision_server.wait_until_idle()

    stages = ("fetch", "queue", "encoder")
    wait_until(lambda: not any(vision_server.metrics()[f"images_waiting/{stage}"] for stage in stages))


def test_metrics_tell_the_stages_of_images_and_refusals(vision_server: ServerProcess) -> None:
    before = vision_server.settled_metrics()
    file = png(Image.effect_noise((200, 200), 60))
    with image_host_in_thread(lambda target: answer(file) if target == "/cat" else answer(b"", status=404)) as host:
        for path in ("/cat", "/none"):
            content = [{"type": "image_url", "image_url": host.url(path)}]
            messages = [{"role": "user", "content": content}]
            vision_server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    refusal(vision_server, [part_of(picture(60, 60))] * 17)
    for data in (b"no image", file[: len(file) // 2]):
        url = f"data:;base64,{base64.b64encode(data).decode()}"
        refusal(vision_server, [{"type": "image_url", "image_url": url}])

    after = vision_server.settled_metrics()
    added = {name: value - before.get(name, 0.0) for name, value in after.items()}
    stages = {stage: added[f"image_{stage}_seconds_count"] for stage in ("fetch", "decode", "resize", "encode")}
    assert stages == {"fetch": 1, "decode": 2, "resize": 1, "encode": 1}
    refusals = {reason: added[f"image_refused_total/{reason}"] for reason in ("number", "fetch", "file", "decode")}
    assert refusals == {"number": 1, "fetch": 1, "file": 1, "decode": 1}


def test_requests_whose_images_are_fetched_count_as_load(vision_server: ServerProcess) -> None:
    image, goes_on = picture(84, 112, 28), Event()

    def answer_late(target: str) -> bytes:
        goes_on.wait(DEADLINE_S)
        return answer(png(image))

    def load() -> int:
        with urllib.request.urlopen(f"{vision_server.url}/load", timeout=DEADLINE_S) as response:
            requests: int = json.load(response)["server_load"]
            return requests

    with image_host_in_thread(answer_late) as host, ThreadPoolExecutor(1) as threads:
        part = {"type": "image_url", "image_url": {"url": host.url()}}
        asked = threads.submit(ask, vision_server, [{"role": "user", "content": [part]}])
        wait_until(lambda: load() == 1)
        goes_on.set()
        asked.result()

    wait_until(lambda: load() == 0)


PROMPT = "w1 <|vision_start|>{}<|vision_end|> w40 w2"  # what the chat template writes


def chat_texts(server: ServerProcess, data: str) -> list[str]:
    """Of an image and w40, by each API of chats."""
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    items = [{"role": "user", "content": [part, {"type": "input_text", "text": "w40"}]}]
    given = {"input": items, "max_output_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    _, response = server.post("/v1/responses", given)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "w40"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS, "temperature": 0}
    _, anthropic = server.post("/v1/messages", {**body, "ignore_eos": True})
    options = {"num_predict": NEW_TOKENS, "temperature": 0}
    shared = {"model": "vision", "stream": False, "options": options, "ignore_eos": True}
    message = {"role": "user", "content": "w40", "images": [data]}
    _, chat = server.post("/api/chat", {**shared, "messages": [message]})
    _, generated = server.post("/api/generate", {**shared, "prompt": "w40", "images": [data]})
    texts = response["output"][0]["content"][0]["text"], anthropic["content"][0]["text"]
    return [*texts, chat["message"]["content"], generated["response"]]


def prompt_texts(server: ServerProcess, data: str) -> list[str]:
    """Of the same prompt, by each API of prompts."""
    images = [{"type": "base64", "data": data}]
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    lightllm = {"multimodal_params": {"images": images}, "parameters": parameters}
    texts: list[str] = []
    for place in ("<|image_pad|>", ""):  # LightLLM's clients write an empty pair
        _, response = server.post("/generate", {**lightllm, "inputs": PROMPT.format(place)})
        texts += response["generated_text"]
    url = {"images": [{"type": "url", "data": f"data:image/png;base64,{data}"}]}
    _, response = server.post("/generate", {**lightllm, "inputs": PROMPT.format(""), "multimodal_params": url})
    texts += response["generated_text"]
    tgi = {"max_new_tokens": NEW_TOKENS, "ignore_eos_token": True}
    inputs = f"w1 ![](data:image/png;base64,{data}) w40 w2"
    _, response = server.post("/generate", {"inputs": inputs, "parameters": tgi})
    texts.append(response["generated_text"])
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    sglang = {"text": PROMPT.format("<|image_pad|>"), "sampling_params": sampling, "image_data": data}
    _, response = server.post("/generate", sglang)
    texts.append(response["text"])
    batch = {**sglang, "text": [sglang["text"]] * 2, "image_data": [data, f"data:image/png;base64,{data}"]}
    _, responses = server.post("/generate", batch)
    return [*texts, *(each["text"] for each in responses)]


def test_the_same_image_by_every_schema_is_one_for_the_caches_and_gives_one_text(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    image = picture(84, 112, 20)
    data = base64.b64encode(png(image)).decode()
    wanted = expected(vision_model[1], [1, image, 40, 2])
    before = vision_server.settled_metrics()

    text, _ = ask(vision_server, [user(image, "w40")])
    others = [*chat_texts(vision_server, data), *prompt_texts(vision_server, data)]

    assert [text, *others] == [wanted] * 12
    after = vision_server.settled_metrics()
    assert after["images_encoded_total"] == before["images_encoded_total"] + 1
    hits = "image_hits_total/kv"
    assert after[hits] == before[hits] + 11  # all prompts are the same for the prefix cache


def test_tokens_of_images_are_counted(vision_server: ServerProcess) -> None:
    image = picture(84, 112, 23)
    data = base64.b64encode(png(image)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "w40"}]

    _, usage = ask(vision_server, [user(image, "w40")])
    _, tokens = vision_server.post("/tokenize", {"messages": [user(image, "w40")]})
    messages = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS}
    _, counted = vision_server.post("/v1/messages/count_tokens", messages)
    text = PROMPT.format("")
    by_size, by_file = {"type": "image_size", "data": [84, 112]}, {"type": "base64", "data": data}
    _, of_size = vision_server.post("/tokens", {"text": text, "multimodal_params": {"images": [by_size]}})
    _, of_both = vision_server.post(
        "/tokens", {"text": f"{text} {text}", "multimodal_params": {"images": [by_file, by_size]}}
    )

    count = usage["prompt_tokens"]
    assert count == 5 + 12
    assert counted["input_tokens"] == tokens["count"] == of_size["ntokens"] == count
    assert of_both["ntokens"] == 2 * count


def test_a_request_sets_the_pixels_of_its_images(vision_server: ServerProcess) -> None:
    """Within the limits of the model, whose images have at most 40 tokens."""
    image = picture(280, 280, 24)

    def image_tokens(**limits: int) -> int:
        _, usage = ask(vision_server, [user(image, "w40")], mm_processor_kwargs=limits)
        return int(usage["prompt_tokens_details"]["image_tokens"])

    assert image_tokens() == 36
    assert image_tokens(max_pixels=9 * 28 * 28) == 9
    assert image_tokens(max_pixels=9 * 28 * 28, min_pixels=9 * 28 * 28) == 9
    small = picture(84, 84, 26)
    _, usage = ask(vision_server, [user(small)], mm_processor_kwargs={"min_pixels": 15 * 28 * 28})
    assert usage["prompt_tokens_details"]["image_tokens"] == 16

    def refusal_of(**limits: int) -> str:
        return refusal(vision_server, [part_of(image)], mm_processor_kwargs=limits)

    assert "max_pixels is 31,361; it must be from 3,136 to 31,360" in refusal_of(max_pixels=28 * 28 * 40 + 1)
    assert "min_pixels 31,360 is more than max_pixels 3,136" in refusal_of(min_pixels=31_360, max_pixels=3136)
    assert "mm_processor_kwargs.fps is not supported yet" in refusal_of(fps=2)


def test_an_image_in_the_output_of_a_tool_of_responses_is_read(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    image = picture(84, 112, 25)
    output = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": "w41"}]
    items = [
        {"role": "user", "content": "w3"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    body = {"input": items, "max_output_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

    status, response = vision_server.post("/v1/responses", body)

    assert status == 200, response
    assert response["output"][0]["content"][0]["text"] == expected(vision_model[1], [1, 3, 1, 1, image, 41, 2])


def test_tokens_of_images_have_no_logprobs(vision_server: ServerProcess) -> None:
    body = {"messages": [user("w5", picture(84, 112, 27), "w34")], "max_tokens": 1, "prompt_logprobs": 1}

    status, response = vision_server.post("/v1/chat/completions", body)

    assert status == 200, response
    found = response["prompt_logprobs"]
    assert [next(iter(each)) for each in found if each] == [str(token_id) for token_id in (5, START, END, 34, 2)]
    assert [number for number, each in enumerate(found) if each is None] == [0, *range(3, 15)]


def test_beams_share_the_image(vision_server: ServerProcess, vision_model: tuple[str, Any]) -> None:
    image = picture(60, 90, 21)
    body = {"messages": [user(image, "w33")], "use_beam_search": True, "n": 3, "max_tokens": 4, "ignore_eos": True}
    before = vision_server.settled_metrics()

    status, response = vision_server.post("/v1/chat/completions", body)

    assert status == 200, response
    texts = [choice["message"]["content"] for choice in response["choices"]]
    assert texts == best_beams(vision_model[1], [1, START, PAD, END, 33, 2], image, 3, 4)
    after = vision_server.settled_metrics()
    assert after["images_encoded_total"] == before["images_encoded_total"] + 1


def test_prompts_with_images_are_refused_if_their_places_are_wrong(vision_server: ServerProcess) -> None:
    data = base64.b64encode(png(picture(60, 60))).decode()
    images = {"images": [{"type": "base64", "data": data}]}

    def refusal_of(path: str = "/generate", **body: Any) -> str:
        status, response = vision_server.post(path, body)
        assert status == 400, response
        return str(response)

    assert "0 places for 1 images" in refusal_of(inputs="w1", multimodal_params=images)
    inputs = PROMPT.format("")
    assert "for /tokens only" in refusal_of(
        inputs=inputs, multimodal_params={"images": [{"type": "image_size", "data": [60, 60]}]}
    )
    assert "not base64" in refusal_of(text=inputs, sampling_params={}, image_data="/etc/passwd")
    assert "audios" in refusal_of("/tokens", text="w1", multimodal_params={"audios": ["x"]})


def test_only_images_of_known_schemes_are_taken_out_of_markdown(
    vision_server: ServerProcess, vision_model: tuple[str, Any]
) -> None:
    body = {"inputs": "w5 ![](w6.png)", "parameters": {"max_new_tokens": 2, "ignore_eos_token": True}}

    status, response = vision_server.post("/generate", body)
    refused, problem = vision_server.post("/generate", {**body, "inputs": "w5 ![](https://127.0.0.1/a.png)"})

    assert status == 200, response
    assert refused == 422
    assert "no public address" in problem["error"]


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
        {"role": "user", "content": [result, {"type": "text", "text": "w42"}]},
    ]

    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    status, response = vision_server.post("/v1/messages", body)

    assert status == 200, response
    assert response["content"][0]["text"] == expected(vision_model[1], [1, 3, 1, 1, image, 1, 42, 2])


def test_clients_of_ollama_are_told_that_the_model_sees(vision_server: ServerProcess) -> None:
    _, shown = vision_server.post("/api/show", {"model": "vision"})

    assert shown["capabilities"] == ["completion", "vision"]
