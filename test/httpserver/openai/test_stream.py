"""A stream has the same content as the whole response, however the text arrives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.openai.chat_routes import CHAT
from lightserve.httpserver.openai.completions_routes import COMPLETION
from lightserve.httpserver.openai.logprobs import CompletionLogprobs, chat_logprobs
from lightserve.httpserver.openai.response import EndpointFormat, ResponseSpec
from lightserve.httpserver.openai.stream import ChunkWriter, delta_json
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import Token
from lightserve.text.parsing import CallArguments, CallStart, Content, Delta, Reasoning
from test.httpserver.openai_server import Server, events, fails, rows, running, tokens
from test.real_model import smollm2_tokenizer as smol

TEXTS = st.text(st.sampled_from('aé日😀\u200d👩\n"\\\u0000 <|'), max_size=4)
PIECES = st.lists(st.tuples(st.integers(0, smol().vocab_size - 1), TEXTS), min_size=1, max_size=8)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "choices": {"n": 3},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        yield server


def fold(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a whole response from the chunks of a stream, as a client would build them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            whole = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert whole["finish_reason"] is None, "a chunk after the end"
            whole["text"] += piece["delta"].get("content", "") if "delta" in piece else piece["text"]
            whole["logprobs"] = extended(whole["logprobs"], piece["logprobs"])
            whole["finish_reason"] = piece["finish_reason"]
            whole["stop_reason"] = piece.get("stop_reason")
    return choices


def extended(known: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    if known is None or more is None:
        return known or more
    return {name: value and value + more[name] for name, value in known.items()}


def whole_choices(response: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            **{name: choice[name] for name in ("logprobs", "finish_reason", "stop_reason")},
        }
        for choice in response["choices"]
    }


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES, stop_reason=st.sampled_from([None, 7, "END"]))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("option", OPTIONS)
def test_folding_a_stream_gives_the_whole_response(
    server: Server, path: str, option: str, pieces: list[tuple[int, str]], stop_reason: int | str | None
) -> None:
    is_chat = "chat" in path
    server.engine.script = tokens(pieces, FinishReason.STOP, stop_reason)
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": ["x", "y"]}
    fields |= OPTIONS[option] if is_chat or option != "logprobs" else {"logprobs": 2}
    without_options = {name: value for name, value in fields.items() if name != "stream_options"}

    whole = server.post(path, without_options).json()
    chunks = events(server.post(path, fields | {"stream": True}))

    assert fold(chunks) == whole_choices(whole)
    assert whole_choices(whole)[0]["text"] == "".join(text for _, text in pieces)
    if option == "usage":
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]


def test_the_events_of_a_chat_have_the_expected_format(server: Server) -> None:
    server.engine.script = rows("Hé", "", "y")

    response = server.chat(stream=True, stream_options={"include_usage": True}, request_id="r")

    first = json.loads(response.text.partition("\n\n")[0].removeprefix("data: "))
    head = f'data: {{"id":"chatcmpl-r","object":"chat.completion.chunk","created":{first["created"]},"model":"tiny"'
    n_prompt = len(server.engine.received[-1].prompt_ids)
    usage = (
        f'{{"prompt_tokens":{n_prompt},"completion_tokens":3,"total_tokens":{n_prompt + 3},'
        '"prompt_tokens_details":{"cached_tokens":2}}'
    )
    none = '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    assert response.text == (
        f'{head},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},{none}'
        f'{head},"choices":[{{"index":0,"delta":{{"content":"Hé"}},{none}'
        f'{head},"choices":[{{"index":0,"delta":{{"content":"y"}},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null}],"usage":null}\n\n'
        f'{head},"choices":[],"usage":{usage}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_the_fields_of_a_chat_response_are_in_openais_order(server: Server) -> None:
    server.engine.script = rows("Hi")

    response = server.chat().json()

    of_openai = ["id", "object", "created", "model", "choices", "system_fingerprint", "usage"]
    assert list(response) == [*of_openai, "prompt_logprobs", "prompt_token_ids"]
    assert list(response["choices"][0]) == ["index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    no_reasoning = {"reasoning_content": None, "reasoning": None}
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None, **no_reasoning}


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": False}], ids=str)
def test_fields_that_are_not_requested_are_null(server: Server, fields: dict[str, Any]) -> None:
    server.engine.script = rows("Hi")

    chat: Any = server.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body=fields
    )
    completion: Any = server.openai.completions.create(model="tiny", prompt="x", extra_body=fields)

    assert (chat.prompt_logprobs, chat.prompt_token_ids, chat.choices[0].token_ids) == (None, None, None)
    assert chat.choices[0].message.reasoning_content is chat.choices[0].message.reasoning is None
    choice = completion.choices[0]
    assert (choice.prompt_logprobs, choice.prompt_token_ids, choice.token_ids) == (None, None, None)


def test_every_choice_of_a_stream_begins_with_its_role_and_ends_once(server: Server) -> None:
    server.engine.script = rows("", "a", "b")

    chunks = events(server.chat(stream=True, n=3))

    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [piece["delta"].get("role") for piece in own] == ["assistant", None, None]
        assert [piece["finish_reason"] for piece in own] == [None, None, "stop"]


class Deltas:
    """A parser that gives the same deltas for every token."""

    is_hidden = has_calls = False
    reasoning_tokens = 0

    def __init__(self, *deltas: Delta) -> None:
        self._deltas = [*deltas]

    def push(self, out: StrOut) -> list[Delta]:
        return self._deltas


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
@pytest.mark.parametrize("has_usage", [False, True])
def test_a_chunk_from_a_prepared_head_is_the_json_of_its_delta(finish: FinishReason | None, has_usage: bool) -> None:
    deltas: list[Delta] = [
        Content('é"\n'),
        Reasoning("\\x"),
        CallStart(1, "call-7", "f"),
        CallArguments(1, '{"a": "'),
        CallStart(2, "call-8", "g", is_custom=True),
        CallArguments(2, 'any "text"', is_custom=True),
        Content(""),
    ]
    new_parser: Any = lambda: Deltas(*deltas)  # noqa: E731
    spec = ResponseSpec(CHAT, "r", "m", n=2, echoes=["", ""], new_parser=new_parser, created=7)
    writer = ChunkWriter(spec, AccessLog("r", "/", is_written=False), has_usage, has_continuous_usage=False)

    written = writer.write([(1, StrOut(0, "x", Token(1), finish_reason=finish))])

    chunks = [json.loads(event.removeprefix(b"data: ")) for event in written.split(b"\n\n")[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks[1:]]
    assert [choice["delta"] for choice in choices] == [delta_json(delta) for delta in deltas]
    assert {choice["index"] for choice in choices} == {1}
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + [finish and finish.value]
    assert all(("usage" in chunk) == has_usage for chunk in chunks)


@given(pieces=PIECES, has_usage=st.booleans())
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_a_chunk_of_text_and_logprobs_is_written_as_one_with_more(
    endpoint: EndpointFormat, pieces: list[tuple[int, str]], has_usage: bool
) -> None:
    new_logprobs: Any = {
        CHAT: lambda _: chat_logprobs(smol(), 2),
        COMPLETION: lambda offset: CompletionLogprobs(smol(), 2, offset=offset),
    }[endpoint]
    spec = ResponseSpec(endpoint, "r", "m", n=1, echoes=[""], new_logprobs=new_logprobs, created=7)
    short, general = (ChunkWriter(spec, AccessLog("r", "/", is_written=False), has_usage, False) for _ in range(2))
    general._has_only_logprobs = False
    top = [(5, -1.5), (9, -math.inf)]
    outs = [(0, StrOut(0, text, Token(token_id, -0.5, top))) for token_id, text in pieces]

    assert [short.write([out]) for out in outs] == [general.write([out]) for out in outs]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("last", ["b", ""])
def test_the_last_tokens_chunk_has_its_text_and_the_finish_reason(server: Server, path: str, last: str) -> None:
    server.engine.script = rows("a", last, finish=FinishReason.LENGTH)
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "x"}

    chunks = [chunk["choices"][0] for chunk in events(server.post(path, fields | {"stream": True}))]

    assert [chunk["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert (chunks[-1]["delta"]["content"] if "chat" in path else chunks[-1]["text"]) == last


def test_a_model_name_with_odd_characters_stays_valid_json(server: Server) -> None:
    object.__setattr__(server.context, "model_name", 'a%d"\\b😀')
    try:
        names = {chunk["model"] for chunk in events(server.complete(stream=True))}
    finally:
        object.__setattr__(server.context, "model_name", "tiny")

    assert names == {'a%d"\\b😀'}


def test_an_error_in_one_choice_ends_the_stream_with_an_error_event(server: Server) -> None:
    server.engine.script = fails(599, "/secret/path broke", "Hel")

    *before, error = events(server.complete(stream=True))

    assert [chunk["choices"][0]["text"] for chunk in before] == ["Hel"]
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in error["error"]["message"]


def test_the_schema_of_both_endpoints_is_valid_and_refers_to_nothing(server: Server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]

    for path in ("/v1/chat/completions", "/v1/completions"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "$ref" not in json.dumps(schema)
        assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
