"""TGI's own Python client, unchanged, against the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from text_generation import AsyncClient, Client
from text_generation.errors import (
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    ValidationError,
)
from text_generation.types import FinishReason as TgiFinishReason

from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from test.httpserver.fake_engine import spell
from test.httpserver.generate.lightllm.test_lightllm_api import TEXT, scripted
from test.httpserver.generate_server import Served, serve

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of the client

PROMPT = "Why is the sky blue?"


def test_generate_gives_text_and_details(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        client = Client(served.url)

        response = await asyncio.to_thread(client.generate, PROMPT, max_new_tokens=7)

        assert response.generated_text == TEXT
        assert response.details.finish_reason == TgiFinishReason.Length
        assert response.details.generated_tokens == len(TEXT)
        assert [token.text for token in response.details.tokens] == list(TEXT)
        assert response.details.tokens[0].logprob == -0.5
        assert response.details.seed is None
        assert response.details.prefill == []
        (received,) = served.fake.received
        assert (received.params.stopping.max_new_tokens, received.params.sampling.is_greedy) == (7, True)

    serve(scenario, tmp_path, spell(TEXT, FinishReason.LENGTH))


def test_generate_stream_gives_a_token_at_a_time(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        client = Client(served.url)

        responses = await asyncio.to_thread(lambda: list(client.generate_stream(PROMPT, seed=3, do_sample=True)))

        assert "".join(response.token.text for response in responses if not response.token.special) == TEXT
        assert all(response.generated_text is None for response in responses[:-1])
        assert responses[-1].generated_text == TEXT
        assert responses[-1].details.finish_reason == TgiFinishReason.EndOfSequenceToken
        assert responses[-1].details.generated_tokens == len(TEXT)
        assert responses[-1].details.seed == 3

    serve(scenario, tmp_path, spell(TEXT))


def test_the_async_client_does_both(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        client = AsyncClient(served.url)

        response = await client.generate(PROMPT, top_n_tokens=2)
        stream = [one async for one in client.generate_stream(PROMPT, top_n_tokens=2)]

        assert response.generated_text == stream[-1].generated_text == TEXT
        assert [token.id for token in response.details.top_tokens[0]] == [0, 1]
        assert [token.id for token in stream[0].top_tokens] == [0, 1]

    serve(scenario, tmp_path, spell(TEXT))


def test_best_of_returns_the_other_sequences_too(tmp_path: Path) -> None:
    answers: list[list[StrOut | ReqFailed]] = [
        [StrOut(0, text, Token(64, logprob=p), finish_reason=FinishReason.STOP)]
        for text, p in (("a", -2.0), ("b", -1.0))
    ]

    async def scenario(served: Served) -> None:
        response = await AsyncClient(served.url).generate(PROMPT, best_of=2, do_sample=True)

        assert response.generated_text == "b"
        (other,) = response.details.best_of_sequences
        assert (other.generated_text, other.finish_reason) == ("a", TgiFinishReason.EndOfSequenceToken)
        seeds = [req.params.sampling.seed or 0 for req in served.fake.received]
        assert {other.seed, response.details.seed} == {seed % 2**64 for seed in seeds}

    serve(scenario, tmp_path, scripted(*answers))


def test_seed_and_stop_have_an_effect(tmp_path: Path) -> None:
    row = StrOut(0, "x.", Token(64, logprob=-1.0), finish_reason=FinishReason.STOP, stop_reason=".")

    async def scenario(served: Served) -> None:
        response = await AsyncClient(served.url).generate(
            PROMPT, seed=2**63 + 5, temperature=0.5, stop_sequences=["."], return_full_text=True, truncate=3
        )

        (received,) = served.fake.received
        assert received.params.sampling.seed == 2**63 + 5 - 2**64
        assert (received.params.text.stop, received.params.text.include_stop) == ((".",), True)
        assert len(received.prompt_ids) == 3
        assert response.generated_text == PROMPT + "x."
        assert response.details.seed == 2**63 + 5
        assert response.details.finish_reason == TgiFinishReason.StopSequence

    serve(scenario, tmp_path, scripted([row]))


@pytest.mark.parametrize("options", [{"max_new_tokens": 5000}, {"truncate": 5000}])
def test_a_request_that_is_refused_raises_validation_error(tmp_path: Path, options: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        client = Client(served.url)
        with pytest.raises(ValidationError, match="Input validation error"):
            await asyncio.to_thread(client.generate, PROMPT, **options)
        with pytest.raises(ValidationError, match="Input validation error"):
            await asyncio.to_thread(lambda: list(client.generate_stream(PROMPT, **options)))

    serve(scenario, tmp_path, spell("ok"))


@pytest.mark.parametrize(
    ("status", "expected"), [(429, OverloadedError), (500, GenerationError), (503, GenerationError)]
)
@pytest.mark.parametrize("tokens", [0, 1])
def test_an_engine_that_fails_raises_the_clients_typed_error(
    tmp_path: Path, status: int, expected: type[Exception], tokens: int
) -> None:
    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        before = [StrOut(req.req_id, "a", Token(64, logprob=-1.0))] * tokens
        return [*before, ReqFailed(req.req_id, status, "no")]

    async def scenario(served: Served) -> None:
        client = AsyncClient(served.url)
        with pytest.raises(expected):
            await client.generate(PROMPT)
        with pytest.raises(expected):
            [one async for one in client.generate_stream(PROMPT)]

    serve(scenario, tmp_path, script)


def test_an_aborted_request_raises_incomplete_generation_error(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.fake.hold.clear()
        stream = AsyncClient(served.url).generate_stream(PROMPT)
        assert (await anext(stream)).token.text == "o"
        served.context.manager._abort_own_requests(None)
        with pytest.raises(IncompleteGenerationError):
            [one async for one in stream]

    serve(scenario, tmp_path, spell("ok"))
