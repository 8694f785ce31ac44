"""The prefix cache for chats, system prompts and choices, with the real default model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from test.api.server import ServerProcess
from test.real_model import LONG

pytestmark = pytest.mark.slow

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
QUESTIONS = [
    "Hello, who are you?",
    "Name a colour.",
    "And a fruit of that colour?",
    "What does it taste like?",
    "Where does it grow?",
]


def ask(server: ServerProcess, path: str, **body: Any) -> Any:
    status, response = server.post(path, {"temperature": 0} | body)
    assert status == 200, response
    return response


def cached(usage: dict[str, Any]) -> int:
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


async def at_once(server: ServerProcess, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(asyncio.to_thread(ask, server, path, **body) for body in bodies))


def test_each_turn_of_a_chat_computes_only_its_new_tokens(server: ServerProcess) -> None:
    messages: list[dict[str, str]] = []
    known = 0  # tokens of the turn before, its answer included
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})

        response = ask(server, CHAT, messages=messages, max_tokens=12, cache_salt="a chat")

        usage = response["usage"]
        assert cached(usage) == max(known - 1, 0), messages  # the KV of an answer's last token is never computed
        known = usage["total_tokens"]
        messages.append(response["choices"][0]["message"])
    assert known > 100


def test_a_system_prompt_of_concurrent_requests_is_computed_once(server: ServerProcess) -> None:
    system = {"role": "system", "content": LONG[:2600]}
    shared = ask(server, "/tokenize", messages=[system], add_generation_prompt=False)["count"]
    users = [{"role": "user", "content": f"{i} is a number. Why?"} for i in range(16)]
    bodies = [{"messages": [system, user], "max_tokens": 1, "cache_salt": "at once"} for user in users]

    responses = asyncio.run(at_once(server, CHAT, bodies))

    usages = [response["usage"] for response in responses]
    own = [usage["prompt_tokens"] - shared for usage in usages]
    computed = sum(usage["prompt_tokens"] - cached(usage) for usage in usages)
    assert 400 < shared < 600
    assert shared < computed <= shared + sum(own)
    assert sum(cached(usage) >= shared for usage in usages) == 15


def test_choices_of_one_prompt_share_its_prefill(server: ServerProcess) -> None:
    body = {"prompt": list(range(2000, 2300)), "n": 4, "max_tokens": 4, "ignore_eos": True, "temperature": 1}

    for options in ({"cache_salt": "four"}, {"disable_prompt_cache": True}):
        with server.computing() as computed:
            response = ask(server, COMPLETE, **body, **options)

        assert len({choice["text"] for choice in response["choices"]}) > 1
        assert response["usage"]["prompt_tokens"] == 300
        assert computed.tokens == 300 + 3 * 1 + 4 * 3  # the others compute the last token of the prompt only


def test_prefixes_are_shared_only_within_a_salt_and_without_opt_out(server: ServerProcess) -> None:
    ids = list(range(3000, 3100))

    def found(**options: Any) -> int:
        return cached(ask(server, COMPLETE, prompt=ids, max_tokens=1, **options)["usage"])

    assert [found(cache_salt="a"), found(cache_salt="a"), found(cache_salt="b")] == [0, 99, 0]
    assert [found(disable_prompt_cache=True), found(disable_prompt_cache=True)] == [0, 0]
    assert [found(), found()] == [0, 99]


def test_the_text_is_the_same_with_and_without_the_cache(server: ServerProcess) -> None:
    body = {"prompt": LONG[:1500], "max_tokens": 16, "temperature": 0.8, "seed": 5}

    alone = ask(server, COMPLETE, **body, disable_prompt_cache=True)
    first, second = (ask(server, COMPLETE, **body, cache_salt="same text") for _ in range(2))

    assert cached(second["usage"]) > 200
    assert alone["choices"] == first["choices"] == second["choices"]
