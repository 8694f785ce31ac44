"""The openai client, unchanged, against a real server with the real default model."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from test.api.server import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
EMOJI: Any = [{"role": "user", "content": "Repeat exactly: 🦙🎉 naïve 漢字 done"}]


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def test_chat(client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=1)
    response = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)

    assert response.object == "chat.completion"
    assert response.model == MODEL
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].message.content == ANSWER
    assert response.choices[0].finish_reason == "stop"
    assert response.usage is not None
    assert response.usage.prompt_tokens == 37
    assert response.usage.completion_tokens == 8
    assert response.usage.total_tokens == 45
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 36  # all but the last: it was asked before


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 45
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("messages", [QUESTION, EMOJI], ids=["plain", "emoji"])
@pytest.mark.parametrize("stop", [None, ["Paris", "漢"]], ids=["no stop", "stop"])
def test_a_joined_chat_stream_equals_the_response(client: openai.OpenAI, messages: Any, stop: list[str] | None) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "n": 3, "seed": 7, "max_tokens": 24, "stop": stop}

    whole = client.chat.completions.create(**options)
    texts, reasons = ["", "", ""], ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]

    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == reasons
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens < 60  # the prompt counts once
    assert "\ufffd" not in "".join(texts)
    for text in texts:
        assert not any(word in text for word in stop or [])


def test_a_joined_completion_stream_equals_the_response(client: openai.OpenAI) -> None:
    prompts = ["One, two,", "日本の首都は", "😀 😃 😄"]
    options: dict[str, Any] = {"model": MODEL, "prompt": prompts, "n": 2, "seed": 3, "max_tokens": 20, "echo": True}

    whole = client.completions.create(**options)
    texts = [""] * 6
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert [choice.text for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert all(text.startswith(prompts[i // 2]) for i, text in enumerate(texts))


def test_n_choices_of_a_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        response = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=5, max_tokens=24, temperature=1.3
        )
        return [choice.message.content for choice in response.choices]

    first = ask()

    assert len(set(first)) == 3
    assert ask() == first


def test_chat_logprobs(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=7, logprobs=True, top_logprobs=3
    )

    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == ANSWER
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == ANSWER
    for entry in logprobs.content:
        best = entry.top_logprobs
        assert len(best) == 3
        assert best[0].token == entry.token  # greedy takes the most likely token
        assert best[0].logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert best[0].logprob >= best[1].logprob >= best[2].logprob
        assert sum(math.exp(one.logprob) for one in best) <= 1.0001


def test_completion_logprobs(client: openai.OpenAI) -> None:
    response = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=6, temperature=0, logprobs=2)

    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == response.choices[0].text
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 6


def test_stop_strings_are_removed_and_reported(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[" is Par"])

    assert response.choices[0].message.content == "The capital of France"
    assert response.choices[0].finish_reason == "stop"
    assert response.choices[0].stop_reason == " is Par"  # type: ignore[attr-defined]


def test_a_prompt_can_be_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
    ids = client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649, 314], max_tokens=5, temperature=0)

    assert ids.choices[0].text == text.choices[0].text


def test_logit_bias_bans_and_forces(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0)
    banned = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, logit_bias={"7042": -100}
    )
    forced = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0, logit_bias={"7042": 100}
    )

    assert free.choices[0].text == " Paris"
    assert banned.choices[0].text != " Paris"
    assert forced.choices[0].text == " Paris Paris Paris"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 8192  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_typed_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=5)

    assert bad.value.param == "temperature"
    assert unknown.value.code == "model_not_found"
    assert long.value.code == "context_length_exceeded"
    assert "9001" in long.value.message or "9000" in long.value.message
    assert "8191" in long.value.message or "8187" in long.value.message


def test_events_match_the_contract(server: ServerProcess) -> None:
    import urllib.request

    body = {"messages": QUESTION, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        raw = response.read()
        kind = response.headers["content-type"]

    events = raw.decode().split("\n\n")
    assert kind.startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parsed[-1]["choices"] == []
