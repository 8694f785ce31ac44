"""/api/chat: bodies of Ollama's clients, whole responses and streams."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightserve.messages.params import FinishReason, GrammarSpec
from lightserve.text.grammar.specs import schema_grammar
from test.httpserver.chat.tool_chats import ALL, THOUGHT, TWO_CALLS, WEATHER, prompt
from test.httpserver.fake_engine import LIMITS
from test.httpserver.ollama.ollama_client import (
    END_FIELDS,
    PLAIN,
    SHOW,
    TOOLS,
    USER,
    chat,
    error_of,
    fold,
    lines,
    whole,
)
from test.httpserver.openai_server import CACHED, Server, fails, rows, running, with_template
from test.text.parsing.corpus import CORPUS, cut
from test.waiting import wait_until

CALL = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def test_a_response_is_a_stream_of_lines_unless_the_body_says_no(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")

    *pieces, last = lines(chat(server))

    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    assert [list(piece) for piece in pieces] == [["model", "created_at", "message", "done"]] * 2
    assert {(piece["model"], piece["done"]) for piece in pieces} == {("tiny", False)}
    assert list(last) == ["model", "created_at", "message", "done", "done_reason", *END_FIELDS]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 2)
    assert all(datetime.fromisoformat(one["created_at"]) for one in (*pieces, last))


def test_a_whole_response_has_the_fields_of_the_last_line(server: Server) -> None:
    server.engine.script = rows("Hel", "lo", finish=FinishReason.LENGTH)

    response = chat(server, stream=False)

    body = whole(response)
    assert response.headers["content-type"] == "application/json"
    assert list(body) == ["model", "created_at", "message", "done", "done_reason", *END_FIELDS]
    assert body["message"] == {"role": "assistant", "content": "Hello"}
    assert (body["done_reason"], body["eval_count"]) == ("length", 2)
    assert body["prompt_eval_count"] == len(server.engine.received[-1].prompt_ids) > CACHED
    assert body["total_duration"] >= body["eval_duration"] > 0
    assert body["prompt_eval_duration"] > 0


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "TINY", None])
def test_a_model_is_found_by_its_name_with_or_without_the_tag(server: Server, name: str | None) -> None:
    server.engine.script = rows("ok")

    assert whole(chat(server, model=name, stream=False))["model"] == (name or "tiny")


@pytest.mark.parametrize("name", ["llama3", "tiny:7b", "x" * 1000])
def test_another_model_is_not_found(server: Server, name: str) -> None:
    status, message = error_of(chat(server, model=name))

    assert status == 404
    assert "not found" in message
    assert len(message) < 300


# what the model writes


def test_thinking_and_calls_are_apart_from_the_content(server: Server) -> None:
    server.engine.script = rows(*ALL)

    message = whole(chat(server, tools=TOOLS, stream=False))["message"]

    assert (message["thinking"], message["content"]) == ("Hm.", "Let me see.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Paris", "days": 2}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert all(call["id"] for call in message["tool_calls"])


def test_a_stream_sends_a_call_as_a_whole(server: Server) -> None:
    server.engine.script = rows(*TWO_CALLS)

    *pieces, last = lines(chat(server, tools=TOOLS))

    calls = [piece["message"]["tool_calls"] for piece in pieces if "tool_calls" in piece["message"]]
    assert [[one["function"]["name"] for one in found] for found in calls] == [["weather"], ["now"]]
    assert last["done_reason"] == "stop"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=st.sampled_from(CORPUS["hermes"]), thinks=st.booleans(), logprobs=st.booleans(), seed=st.integers(0, 99))
def test_the_lines_of_a_stream_add_up_to_the_whole_message(
    server: Server, sample: Any, thinks: bool, logprobs: bool, seed: int
) -> None:
    text = (THOUGHT if thinks else "") + sample.text
    server.engine.script = rows(*cut(text, random.Random(seed)))
    fields = {"tools": TOOLS, "logprobs": logprobs}

    body, stream = whole(chat(server, stream=False, **fields)), lines(chat(server, **fields))

    assert without_ids(fold(stream)) == without_ids(body["message"])
    assert body.get("logprobs", []) == [entry for one in stream for entry in one.get("logprobs", ())]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"tool_calls": [call["function"] for call in message.get("tool_calls", ())]}


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", '{"city": oops}'])
def test_broken_arguments_are_an_object_too(server: Server, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
    server.engine.script = rows(text, finish=FinishReason.LENGTH)

    message = whole(chat(server, tools=TOOLS, stream=False))["message"]

    calls = message.get("tool_calls", [])  # none: the output was cut off before an object of arguments
    assert message["content"] == ""
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)


def test_logprobs_are_in_the_line_of_their_token(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")

    *pieces, last = lines(chat(server, logprobs=True, top_logprobs=2))

    assert [piece["logprobs"][0]["logprob"] for piece in pieces] == [-0.5, -1.5]
    assert [len(piece["logprobs"][0]["top_logprobs"]) for piece in pieces] == [2, 2]
    assert list(pieces[0]["logprobs"][0]) == ["token", "logprob", "bytes", "top_logprobs"]
    assert "logprobs" not in last


# what a request may say


def test_messages_with_calls_and_results_reach_the_template(server: Server) -> None:
    server.engine.script = rows("ok")
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [CALL, {"function": {"name": "now"}}]},
        {"role": "tool", "tool_name": "now", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "images": []},
        USER,
    ]

    whole(chat(server, messages=messages, tools=TOOLS, stream=False))

    _, _, answer, noon, sunny, *_ = prompt(server)["messages"]
    one, two = answer["tool_calls"]
    assert answer["reasoning_content"] == "Hm."
    assert one["function"] == CALL["function"]
    assert (noon["tool_call_id"], noon["name"], noon["content"]) == (two["id"], "now", "noon")
    assert (sunny["tool_call_id"], sunny["name"], sunny["content"]) == (one["id"], "weather", "sunny")
    assert all(re.fullmatch("[0-9a-z]{9}", call["id"]) for call in (one, two))


def test_ids_that_a_client_sends_stay(server: Server) -> None:
    server.engine.script = rows("ok")
    answer = {"role": "assistant", "tool_calls": [CALL | {"id": "a", "type": "function"}, CALL | {"id": "b"}]}
    results = [{"role": "tool", "content": "1", "tool_call_id": "b"}, {"role": "tool", "content": "2"}]

    whole(chat(server, messages=[USER, answer, *results], tools=TOOLS, stream=False))

    assert [one.get("tool_call_id") for one in prompt(server)["messages"]] == [None, None, "b", "a"]


def test_a_result_without_a_call_gets_an_id(server: Server) -> None:
    server.engine.script = rows("ok")

    whole(chat(server, messages=[USER, {"role": "tool", "content": "1"}], stream=False))

    assert prompt(server)["messages"][-1]["tool_call_id"] == "000000001"


def test_tools_reach_the_template_and_need_no_type(server: Server) -> None:
    server.engine.script = rows("ok")

    whole(chat(server, tools=TOOLS, stream=False))

    assert prompt(server)["tools"] == [TOOLS[0], {"type": "function", **TOOLS[1]}]


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    server.engine.script = rows(" sunny.")

    body = whole(chat(server, messages=[USER, {"role": "assistant", "content": "It is"}], stream=False))

    shown = server.context.tokenizer.decode(server.engine.received[-1].prompt_ids)
    assert shown.endswith('"content": "It is')
    assert body["message"]["content"] == " sunny."


@pytest.mark.parametrize(
    ("think", "thinks", "effort"), [(None, 1, ""), (True, True, ""), (False, False, ""), ("high", True, "high")]
)
def test_think_sets_what_templates_know(server: Server, think: Any, thinks: Any, effort: str) -> None:
    server.engine.script = rows("ok")

    whole(chat(server, think=think, stream=False))

    assert (prompt(server)["thinks"], prompt(server)["effort"]) == (thinks, effort)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (None, None),
        ("", None),
        ("json", GrammarSpec("json_object")),
        (WEATHER, schema_grammar(WEATHER, is_strict=False)),
    ],
    ids=["none", "empty", "json", "schema"],
)
def test_format_is_a_grammar(server: Server, given: Any, grammar: GrammarSpec | None) -> None:
    server.engine.script = rows("{}")

    whole(chat(server, format=given, think=False, stream=False))

    found = server.engine.received[-1].params.sampling.grammar
    assert (found and (found.kind, found.text)) == (grammar and (grammar.kind, grammar.text))


def test_options_reach_the_engine(server: Server) -> None:
    server.engine.script = rows("ok")
    options = {
        "num_predict": 7.0,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "typical_p": 0.75,
        "seed": 5,
        "stop": ["a", "b"],
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "num_ctx": 4096,
        "mirostat": 1,
        "use_mmap": True,
        "tomorrow": "x",
    }

    whole(chat(server, options=options, keep_alive="5m", stream=False))

    params = server.engine.received[-1].params
    assert (params.stopping.max_new_tokens, params.text.stop) == (7, ("a", "b"))
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
    assert (sampling.typical_p, sampling.seed, sampling.repetition_penalty) == (0.75, 5, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)


@pytest.mark.parametrize("num_predict", [-1, -2, 0, None])
def test_without_a_limit_the_response_may_fill_the_context(server: Server, num_predict: int | None) -> None:
    server.engine.script = rows("ok")

    whole(chat(server, options={"num_predict": num_predict}, keep_alive=-1, stream=False))

    req = server.engine.received[-1]
    assert len(req.prompt_ids) + req.params.stopping.max_new_tokens == LIMITS.max_req_total_len


def test_a_limit_beyond_the_context_is_lowered(server: Server) -> None:
    server.engine.script = rows("ok")

    whole(chat(server, options={"num_predict": 100_000}, stream=False))

    req = server.engine.received[-1]
    assert len(req.prompt_ids) + req.params.stopping.max_new_tokens == LIMITS.max_req_total_len


def test_repeat_last_n_of_0_turns_the_penalty_off(server: Server) -> None:
    server.engine.script = rows("ok")

    whole(chat(server, options={"repeat_penalty": 1.5, "repeat_last_n": 0}, stream=False))

    assert server.engine.received[-1].params.sampling.repetition_penalty == 1


@pytest.mark.parametrize("messages", [None, []])
def test_no_messages_only_ask_whether_the_model_is_loaded(server: Server, messages: Any) -> None:
    body = whole(chat(server, messages=messages))

    assert (body["done"], body["done_reason"], body["message"]["content"]) == (True, "load", "")


# errors


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"num_predict": "7"}}, "options.num_predict"),
        ({"options": {"num_predict": 7.5}}, "options.num_predict"),
        ({"options": {"seed": -9223372036854776001}}, "options.seed"),
        ({"options": []}, "options"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "nothing"}}, "format"),
        ({"think": "perhaps"}, "think"),
        ({"stream": "no"}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "an image is not supported yet"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], named: str) -> None:
    received = len(server.engine.received)

    status, message = error_of(chat(server, **fields))

    assert status == 400
    assert named in message
    assert len(server.engine.received) == received


def test_a_model_that_does_not_think_or_call_refuses_both(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(PLAIN)) as plain:
        thinks, calls = error_of(chat(plain, think=True)), error_of(chat(plain, tools=TOOLS))
        quiet = chat(plain, think=False, stream=False)

    assert thinks == (400, "think: 'tiny' does not support thinking (--reasoning_parser)")
    assert calls == (400, "tools: 'tiny' does not support tools (--tool_call_parser)")
    assert whole(quiet)["message"]["content"] == "Hello"


def test_an_error_before_the_first_token_is_a_status(server: Server) -> None:
    server.engine.script = fails(429, "the queue is full")

    response = chat(server)

    assert error_of(response) == (429, "the queue is full")
    assert response.headers["retry-after"] == "1"


def test_an_error_after_the_first_token_is_a_line(server: Server) -> None:
    server.engine.script = fails(500, "numerical error", "Hel")

    first, last = lines(chat(server))

    assert first["message"]["content"] == "Hel"
    assert last == {"error": "numerical error"}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/api/chat", 405), ("POST", "/api/nothing", 404), ("GET", "/api", 404)]
)
def test_errors_of_paths_have_ollamas_shape(server: Server, method: str, path: str, status: int) -> None:
    assert error_of(server.http.request(method, path))[0] == status


def test_a_client_that_disconnects_aborts_its_request(server: Server) -> None:
    server.engine.script = rows("a", "b", "c")
    server.engine.aborted.clear()
    server.hold()
    try:
        with server.http.stream("POST", "/api/chat", json={"messages": [USER]}) as response:
            next(response.iter_lines())
        wait_until(lambda: len(server.engine.aborted) == 1)
    finally:
        server.release()

    wait_until(lambda: server.context.manager.running_requests == 0)
