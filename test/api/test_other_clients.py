"""Clients of TGI and LightLLM, unchanged, against a real server with the real default model."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

from test.api.server import ServerProcess

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"


@pytest.fixture
def tgi(server: ServerProcess) -> Any:
    return Client(server.url, timeout=300)


def test_tgi_generate_with_details(tgi: Any) -> None:
    response = tgi.generate(PROMPT, max_new_tokens=8, do_sample=False)

    assert response.generated_text.startswith(" Paris")
    assert response.details.generated_tokens == 8
    assert response.details.finish_reason == "length"
    assert "".join(token.text for token in response.details.tokens) == response.generated_text
    assert all(token.logprob <= 0 for token in response.details.tokens)


def test_a_joined_tgi_stream_equals_the_whole_response(tgi: Any) -> None:
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 4, "temperature": 0.9}):
        whole = tgi.generate("日本の首都は 🦙", max_new_tokens=16, **options)
        events = list(tgi.generate_stream("日本の首都は 🦙", max_new_tokens=16, **options))

        assert "".join(event.token.text for event in events if not event.token.special) == whole.generated_text
        assert events[-1].generated_text == whole.generated_text
        assert events[-1].details.generated_tokens == whole.details.generated_tokens
        assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]


def test_tgi_seed_best_of_stop_and_full_text(tgi: Any) -> None:
    one = tgi.generate(PROMPT, max_new_tokens=12, seed=9, do_sample=True)
    two = tgi.generate(PROMPT, max_new_tokens=12, seed=9, do_sample=True)
    best = tgi.generate(PROMPT, max_new_tokens=6, best_of=2, do_sample=True)
    stopped = tgi.generate(PROMPT, max_new_tokens=12, stop_sequences=[" Par"], return_full_text=True)

    assert one.generated_text == two.generated_text
    assert one.details.seed == 9
    assert len(best.details.best_of_sequences) == 1
    assert stopped.details.finish_reason == "stop_sequence"
    assert stopped.generated_text.startswith(PROMPT)


def test_tgi_validation_errors_are_typed(server: ServerProcess) -> None:
    async def ask() -> None:
        with pytest.raises(ValidationError):
            await AsyncClient(server.url).generate(PROMPT, max_new_tokens=100_000)

    asyncio.run(ask())


def test_a_lightllm_benchmark_client_counts_every_token(server: ServerProcess) -> None:
    async def one(session: aiohttp.ClientSession, count: int) -> list[float]:
        stamps = []
        body = {"inputs": PROMPT, "parameters": {"do_sample": False, "ignore_eos": True, "max_new_tokens": count}}
        async with session.post(f"{server.url}/generate_stream", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.strip():
                    stamps.append(time.perf_counter())
        return stamps

    async def many() -> list[list[float]]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(one(session, 8 + i) for i in range(8)))

    assert [len(stamps) for stamps in asyncio.run(many())] == list(range(8, 16))


def test_a_joined_lightllm_stream_equals_the_whole_response(server: ServerProcess) -> None:
    async def ask() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        parameters = {"do_sample": True, "seed": 3, "max_new_tokens": 16, "return_details": True, "ignore_eos": True}
        body = {"inputs": "日本の首都は 🦙", "parameters": parameters}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{server.url}/generate", json=body) as response:
                whole = await response.json()
            async with session.post(f"{server.url}/generate_stream", json=body) as response:
                raw = await response.read()
        return whole, [json.loads(line.removeprefix(b"data:")) for line in raw.split(b"\n\n") if line]

    whole, events = asyncio.run(ask())

    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"][0]
    assert [event["token"]["id"] for event in events] == [token["id"] for token in whole["tokens"]]
    assert [event["finished"] for event in events] == [False] * 15 + [True]
    assert events[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert whole["count_output_tokens"] == 16
