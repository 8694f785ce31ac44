"""Token ids in responses: return_token_ids and return_tokens_as_token_ids, as vLLM's clients use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.config import HttpConfig
from test.httpserver.openai_server import Server, events, rows, running, with_template
from test.real_model import smollm2_tokenizer as smol

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
PIECES = ["Hel", "", "lo"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = HttpConfig(reasoning_parser="deepseek_r1")
    with running(tmp_path_factory.mktemp("run"), with_template(TEMPLATE), config) as server:
        yield server


def ids_of(pieces: list[str]) -> list[int]:
    return [(smol().encode(text, add_special_tokens=False) or [0])[0] for text in pieces]


@pytest.mark.parametrize("n", [1, 2])
def test_a_completion_has_the_ids_of_prompt_and_output(server: Server, n: int) -> None:
    server.engine.script = rows(*PIECES)

    response: Any = server.openai.completions.create(
        model="tiny", prompt=["Once", "Once upon"], n=n, extra_body={"return_token_ids": True}
    )

    assert [choice.token_ids for choice in response.choices] == [ids_of(PIECES)] * 2 * n
    prompts = [choice.prompt_token_ids for choice in response.choices]
    assert prompts == [smol().encode("Once")] * n + [smol().encode("Once upon")] * n


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"echo": True}], ids=str)
def test_every_chunk_of_a_completion_has_the_ids_of_its_tokens(server: Server, fields: dict[str, Any]) -> None:
    server.engine.script = rows(*PIECES)

    chunks = events(server.complete(prompt="Once", stream=True, return_token_ids=True, **fields))

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids_of(PIECES)
    assert choices[0]["prompt_token_ids"] == smol().encode("Once")
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


def test_a_chat_has_the_ids_of_prompt_and_output(server: Server) -> None:
    server.engine.script = rows("Hm", "</think>", "Yes")

    response: Any = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, extra_body={"return_token_ids": True}
    )

    assert response.prompt_token_ids == server.engine.received[-1].prompt_ids
    assert [choice.token_ids for choice in response.choices] == [ids_of(["Hm", "</think>", "Yes"])] * 2


def test_a_streamed_chat_has_the_prompts_ids_in_its_first_chunk(server: Server) -> None:
    server.engine.script = rows("Hm", "</think>", "Yes", "")

    first, *rest = events(server.chat(stream=True, return_token_ids=True))

    assert first["prompt_token_ids"] == server.engine.received[-1].prompt_ids
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    found = [token_id for chunk in rest for token_id in chunk["choices"][0].get("token_ids", ())]
    assert found == ids_of(["Hm", "</think>", "Yes", ""])


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_ids_of_hidden_reasoning_are_hidden_too(server: Server, is_stream: bool) -> None:
    server.engine.script = rows("Hm", "</think>", "Yes")

    response = server.chat(stream=is_stream, return_token_ids=True, include_reasoning=False)

    whole = events(response)[1:] if is_stream else [response.json()]
    found = [token_id for one in whole for token_id in one["choices"][0].get("token_ids", ())]
    assert found == ids_of(["Yes"])


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_of_a_completion_may_name_tokens_by_id(server: Server, is_stream: bool) -> None:
    server.engine.script = rows("Hel", "lo")

    response = server.complete(logprobs=2, return_tokens_as_token_ids=True, stream=is_stream)

    whole = events(response) if is_stream else [response.json()]
    tokens = [token for one in whole for token in one["choices"][0]["logprobs"]["tokens"]]
    tops = [top for one in whole for top in one["choices"][0]["logprobs"]["top_logprobs"]]
    assert tokens == [f"token_id:{token_id}" for token_id in ids_of(["Hel", "lo"])]
    assert [list(top) for top in tops] == [[token, "token_id:100", "token_id:101"] for token in tokens]


def test_logprobs_of_an_echo_may_name_tokens_by_id(server: Server) -> None:
    server.engine.script = rows("Hel")

    response = server.complete(prompt="Once upon", echo=True, logprobs=0, return_tokens_as_token_ids=True)

    expected = [*smol().encode("Once upon"), *ids_of(["Hel"])]
    assert response.json()["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in expected]


def test_logprobs_of_a_chat_may_name_tokens_by_id(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")

    response = server.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()

    content = response["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in ids_of(["Hel", "lo"])]
    assert [entry["top_logprobs"][0]["token"] for entry in content] == ["token_id:100"] * 2


@pytest.mark.parametrize("field", ["return_token_ids", "return_tokens_as_token_ids"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "Hi"}), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5})],
    ids=["responses", "messages"],
)
def test_apis_without_a_place_for_token_ids_refuse_them(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    response = server.post(path, body | {field: True})

    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
