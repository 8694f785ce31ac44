"""Structured output with the real default model: every complete output matches its grammar, through every API."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import jsonschema_rs
import openai
import pytest

from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.offline.llm import LLM
from lightserve.text.grammar.specs import schema_grammar
from test.api.server import ServerProcess
from test.schemas import schema_of

pytestmark = pytest.mark.slow

AT_ONCE = 16
MAX_TOKENS = 250
MODEL = "SmolLM2-135M-Instruct"
REGEXES = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"(yes|no), because [a-z ]{5,30}\.",
    r"\+[1-9][0-9]{6,10}",
    "[A-Z]{3}(,[A-Z]{3}){2}",
)
EXPRESSION = """root ::= term (" " [-+*/] " " term)*
term ::= [0-9]{1,3} | "(" root ")"
"""
FLAT = r"[0-9]{1,3}( [-+*/] [0-9]{1,3})*"  # an expression without parentheses

Ended = list[tuple[str, str]]  # of each choice, its text and its finish reason


async def ask(client: openai.AsyncOpenAI, is_streamed: bool, **options: Any) -> Ended:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Answer in a few words about a person or a thing you know."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        **options,
    }
    if not is_streamed:
        choices = (await client.chat.completions.create(**request)).choices
        return [(choice.message.content or "", choice.finish_reason) for choice in choices]
    texts, reasons = [""] * request.get("n", 1), [""] * request.get("n", 1)
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return list(zip(texts, reasons, strict=True))


def ask_all(server: ServerProcess, requests: list[dict[str, Any]]) -> list[Ended]:
    async def run() -> list[Ended]:
        limit = asyncio.Semaphore(AT_ONCE)
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600) as client:

            async def one(request: dict[str, Any]) -> Ended:
                async with limit:
                    return await ask(client, **request)

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())


def options_of(seed: int) -> dict[str, Any]:
    """Every second request is streamed; one in four has two choices, one in three logprobs."""
    options: dict[str, Any] = {"is_streamed": seed % 2 == 0, "seed": seed}
    if seed % 4 == 1:
        options["n"] = 2
    if seed % 3 == 0:
        options |= {"logprobs": True, "top_logprobs": 2}
    return options


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])
def test_json_is_valid_for_its_schema(server: ServerProcess, count: int) -> None:
    schemas = [schema_of(seed) for seed in range(count)]
    requests = [options_of(seed) | {"response_format": response_format(schema)} for seed, schema in enumerate(schemas)]

    responses = ask_all(server, requests)

    ended = [
        (schema, text)
        for schema, response in zip(schemas, responses, strict=True)
        for text, why in response
        if why == "stop"
    ]
    assert len(ended) > 0.7 * sum(map(len, responses))
    for schema, text in ended:
        jsonschema_rs.validate(schema, json.loads(text))


CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
    "required": ["name", "country"],
}
TOKYO = {"messages": [{"role": "user", "content": "Describe Tokyo"}], "stream": False}


def test_an_answer_has_the_properties_of_its_schema_and_ends(server: ServerProcess) -> None:
    """The schema says nothing of other properties. The model would go on with them until its tokens are used up."""
    chat = TOKYO | {"response_format": response_format(CITY), "max_tokens": MAX_TOKENS, "temperature": 0}
    ollama = TOKYO | {"model": MODEL, "format": CITY, "options": {"temperature": 0, "num_predict": MAX_TOKENS}}

    _, answer = server.post("/v1/chat/completions", chat)
    _, same = server.post("/api/chat", ollama)

    assert answer["choices"][0]["finish_reason"] == same["done_reason"] == "stop"
    for text in (answer["choices"][0]["message"]["content"], same["message"]["content"]):
        assert list(json.loads(text)) == ["name", "country"]


def test_json_object_gives_a_json_object(server: ServerProcess) -> None:
    requests = [options_of(seed) | {"response_format": {"type": "json_object"}} for seed in range(4)]

    for response in ask_all(server, requests):
        for text, why in response:
            assert why == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("regex", REGEXES)
def test_the_output_matches_its_regular_expression(server: ServerProcess, regex: str) -> None:
    requests = [options_of(seed) | {"extra_body": {"guided_regex": regex}} for seed in range(6)]

    for response in ask_all(server, requests):
        for text, why in response:
            assert why == "stop"
            assert re.fullmatch(regex, text)


def test_the_output_is_one_of_the_choices(server: ServerProcess) -> None:
    choices = {"Paris", "Rome", "New York"}
    body = {"structured_outputs": {"choice": sorted(choices)}}

    responses = ask_all(server, [options_of(seed) | {"extra_body": body} for seed in range(6)])

    assert {text for response in responses for text, _ in response} <= choices


def test_the_output_matches_its_grammar(server: ServerProcess) -> None:
    body = {"structured_outputs": {"grammar": EXPRESSION}}

    requests = [options_of(seed) | {"extra_body": body, "max_tokens": 60} for seed in range(4)]

    for response in ask_all(server, requests):
        for text, why in response:
            assert why == "length" or is_expression(text)


def is_expression(text: str) -> bool:
    """Repeatedly replace the innermost parentheses with a number."""
    inner, flat = re.compile(rf"\({FLAT}\)"), re.compile(FLAT)
    while inner.search(text):
        text = inner.sub("1", text)
    return flat.fullmatch(text) is not None


def test_lightllm_and_tgi_support_the_same_grammars(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    bodies: list[dict[str, Any]] = [
        {"guided_json": schema, "max_new_tokens": MAX_TOKENS},
        {"grammar": {"type": "json", "value": schema}, "max_new_tokens": MAX_TOKENS, "details": True},
    ]

    for parameters in bodies:
        status, response = server.post("/generate", {"inputs": "The age of Bob:", "parameters": parameters})

        assert status == 200, response
        text = response["generated_text"]
        jsonschema_rs.validate(schema, json.loads(text[0] if isinstance(text, list) else text))


def test_a_request_whose_grammar_is_stuck_fails_alone(server: ServerProcess) -> None:
    status, response = server.post(
        "/v1/completions", {"prompt": "x", "guided_regex": "[0-9]+", "allowed_token_ids": [1000], "max_tokens": 5}
    )

    assert status == 400
    assert "no token is left" in response["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_forced_tokens_take_no_steps(server: ServerProcess) -> None:
    properties = {"a_name_of_many_tokens_altogether": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    body = {"prompt": "x", "guided_json": schema, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": False}
    before = server.settled_metrics()

    plain, scored = (server.post("/v1/completions", body | more)[1] for more in ({}, {"logprobs": 1}))

    after = server.settled_metrics()
    steps, forced = (after[name] - before[name] for name in ("iteration_tokens_total_count", "forced_tokens_total"))
    tokens = plain["usage"]["completion_tokens"]
    assert plain["choices"][0]["text"] == scored["choices"][0]["text"]
    assert tokens == scored["usage"]["completion_tokens"]
    assert forced >= 5
    assert steps <= 2 * tokens - forced + 2  # with logprobs each token has its step; each request is let go in one more


@pytest.mark.long
def test_preemption_and_batching_do_not_change_the_output() -> None:
    """With few slots, so that requests are preempted repeatedly; every third has no grammar."""
    rng = random.Random(0)
    schemas = [schema_of(seed) if seed % 3 else None for seed in range(40)]
    wanted = [
        GenerationParams.of(
            max_new_tokens=120, temperature=0.8, seed=i, grammar=None if schema is None else schema_grammar(schema)
        )
        for i, schema in enumerate(schemas)
    ]
    prompts = [[rng.randrange(40_000) for _ in range(rng.randint(3, 30))] for _ in wanted]
    small = LLM(max_total_token_num=500, device="cpu", quantization="none")
    small.generate(
        [[5]] * 40, GenerationParams.of(max_new_tokens=4, ignore_eos=True)
    )  # so that it takes answers to be short

    generations = small.generate(prompts, wanted)

    assert small._scheduler.num_preemptions > 0
    large = LLM(max_total_token_num=8000, device="cpu", quantization="none").generate(prompts, wanted)
    assert [one.token_ids for one in generations] == [one.token_ids for one in large]
    for schema, generation in zip(schemas, generations, strict=True):
        if schema is not None and generation.finish_reason is FinishReason.STOP:
            jsonschema_rs.validate(schema, json.loads(generation.text))
