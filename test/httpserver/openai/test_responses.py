"""/v1/responses: through the openai client, and as its events."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightserve.messages.params import FinishReason
from test.httpserver.chat.tool_chats import ALL, THOUGHT, WEATHER, prompt
from test.httpserver.openai_server import CACHED, Server, fails, named_events, rows, running, with_template
from test.text.parsing.corpus import CORPUS, PARIS, cut

# what a template shows of a model that thinks and calls tools: <tool_call> </think>
SHOW = (
    "{{ {'messages': messages, 'tools': tools, 'effort': reasoning_effort | default('')} | tojson }}"
    "{# <tool_call> </think> #}"
)
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Rain?", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": None},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def create(server: Server, **fields: Any) -> Any:
    response = server.post("/v1/responses", {"input": "Hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Server, **fields: Any) -> tuple[int, Any]:
    server.engine.received.clear()
    response = server.post("/v1/responses", {"input": "Hi"} | fields)
    assert server.engine.received == []
    return response.status_code, response.json()["error"]


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return named_events(server.post("/v1/responses", {"input": "Hi", "stream": True} | fields))


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream, out of its deltas only, as a client puts them together."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        item = items[event["output_index"]] if "item_id" in event else {}
        assert item.get("id") == event.get("item_id")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert items[event["output_index"]] == event["item"]
        elif "content_index" in event:
            fold_content(kind, event, item["content"][event["content_index"]])
        elif item:
            fold_call(kind, event, item)
    return items


def fold_content(kind: str, event: dict[str, Any], part: dict[str, Any]) -> None:
    if kind in ("output_text.delta", "reasoning_text.delta"):
        part["text"] += event["delta"]
        part.get("logprobs", []).extend(event.get("logprobs", ()))
    elif kind == "content_part.done":
        assert part == event["part"]
    else:
        assert part["text"] == event["text"]
        assert part.get("logprobs") == event.get("logprobs")


def fold_call(kind: str, event: dict[str, Any], call: dict[str, Any]) -> None:
    name = "input" if kind.startswith("custom_tool_call_input") else "arguments"
    if kind.endswith(".delta"):
        call[name] += event["delta"]
    else:
        assert call[name] == event[name]
        assert call["name"] == event.get("name", call["name"])


def unnamed(value: Any) -> Any:
    """Without what differs from request to request."""
    if isinstance(value, list):
        return [unnamed(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: unnamed(one) for name, one in value.items() if name not in ("id", "call_id", "created_at")}


def test_the_client_gets_text(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")

    response = server.openai.responses.create(model="tiny", input="Hi", instructions="Be kind.", metadata={"a": "b"})

    assert response.output_text == "Hello"
    assert (response.status, response.model, response.instructions, response.metadata) == (
        "completed",
        "tiny",
        "Be kind.",
        {"a": "b"},
    )
    assert response.usage is not None
    assert response.usage.output_tokens == 2
    assert response.usage.input_tokens_details.cached_tokens == CACHED
    assert response.usage.total_tokens == response.usage.input_tokens + 2
    assert [one["role"] for one in prompt(server)["messages"]] == ["system", "user"]


def test_the_client_gets_text_in_a_stream(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")

    with server.openai.responses.stream(model="tiny", input="Hi") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()

    assert final.output_text == "Hello"
    assert [kind.removeprefix("response.") for kind in kinds] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_reasoning_text_and_calls_are_items_in_their_order(server: Server) -> None:
    server.engine.script = rows("<think>", ALL.removeprefix("<think>"))

    response: Any = server.openai.responses.create(model="tiny", input="Hi", tools=TOOLS)

    thought, message, weather, now = response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.", [])
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (weather.type, weather.name, weather.arguments) == ("function_call", "weather", PARIS)
    assert (now.name, now.arguments, now.status) == ("now", "{}", "completed")
    assert len({one.id for one in response.output}) == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_the_client_gets_calls_in_a_stream(server: Server) -> None:
    server.engine.script = rows(*(ALL[at : at + 5] for at in range(0, len(ALL), 5)))

    with server.openai.responses.stream(model="tiny", input="Hi", tools=TOOLS) as events:
        kinds = [event.type for event in events]
        final: Any = events.get_final_response()

    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.reasoning_text.done") == 1
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].arguments == PARIS


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.sampled_from([one.text for one in CORPUS["hermes"] if one.text]),
    thought=st.sampled_from(["", THOUGHT, "Hm.</think>"]),
    seed=st.integers(0, 2**32),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_folding_a_stream_gives_the_whole_response(
    server: Server, text: str, thought: str, seed: int, finish: FinishReason
) -> None:
    server.engine.script = rows(*cut(thought + text, random.Random(seed)), finish=finish)

    whole = create(server, tools=TOOLS)
    events = stream(server, tools=TOOLS)

    last = events[-1]["response"]
    assert unnamed(last) == unnamed(whole)
    assert fold(events) == last["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"


def test_a_truncated_response_is_incomplete(server: Server) -> None:
    server.engine.script = rows("Hel", finish=FinishReason.LENGTH)

    response = create(server, max_output_tokens=1)

    assert server.engine.received[-1].params.stopping.max_new_tokens == 1
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def test_a_truncated_stream_ends_with_completed(server: Server) -> None:
    """The client raises an exception without this event, and Codex sends the request again."""
    server.engine.script = rows("Hel", finish=FinishReason.LENGTH)

    with server.openai.responses.stream(model="tiny", input="Hi") as events:
        final = events.get_final_response()

    assert (final.status, final.output_text) == ("incomplete", "Hel")
    assert final.incomplete_details is not None
    assert final.incomplete_details.reason == "max_output_tokens"


LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_the_client_gets_logprobs_of_the_text(server: Server) -> None:
    server.engine.script = rows("<think>", "Hm.", "</think>", "Hel", "lo")

    response: Any = server.openai.responses.create(model="tiny", input="Hi", **LOGPROBS)

    assert server.engine.received[-1].params.sampling.logprobs == 2
    [text] = response.output[1].content
    assert [one.logprob for one in text.logprobs] == [-3.5, -4.5]
    assert [len(one.top_logprobs) for one in text.logprobs] == [2, 2]
    assert bytes(text.logprobs[0].bytes).decode() == text.logprobs[0].token
    assert response.top_logprobs == 2


def test_logprobs_are_in_the_deltas(server: Server) -> None:
    server.engine.script = rows("Hel", "lo", " <tool", " x", ALL.removeprefix(THOUGHT))

    events = stream(server, tools=TOOLS, **LOGPROBS)

    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    sent = [one["logprob"] for event in deltas for one in event["logprobs"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert sent[:2] == [-0.5, -1.5]
    assert sent == [one["logprob"] for one in done["logprobs"]]
    assert fold(events) == events[-1]["response"]["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_included_logprobs_need_no_alternatives(server: Server) -> None:
    server.engine.script = rows("Hi")

    response = create(server, include=LOGPROBS["include"])

    [one] = response["output"][0]["content"][0]["logprobs"]
    assert one["top_logprobs"] == []


class City(pydantic.BaseModel):
    name: str


def test_the_client_parses_a_schema(server: Server) -> None:
    server.engine.script = rows('{"name": ', '"Paris"}')

    response = server.openai.responses.parse(model="tiny", input="Hi", text_format=City)

    assert response.output_parsed == City(name="Paris")
    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_a_websocket_is_declined_with_the_status_that_codex_knows(server: Server) -> None:
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}

    upgrade = server.http.get("/v1/responses", headers=headers)
    plain = server.http.get("/v1/responses")

    assert (upgrade.status_code, plain.status_code) == (426, 405)
    assert "POST /v1/responses" in upgrade.json()["error"]["message"]


def test_an_empty_output_has_no_items(server: Server) -> None:
    server.engine.script = rows("")

    response = create(server)

    assert (response["status"], response["output"]) == ("completed", [])


def test_the_items_of_one_assistant_turn_become_one_message(server: Server) -> None:
    server.engine.script = rows("Hi")
    turn = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rain"}, {"type": "input_text", "text": "now?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": PARIS},
        {"type": "function_call", "call_id": "2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "wet"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "function_call", "call_id": "3", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "3", "output": ""},
    ]

    create(server, input=turn, tools=TOOLS)

    user, assistant, wet, noon, again, empty = prompt(server)["messages"]
    assert user == {"role": "user", "content": "Rain\nnow?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [one["function"]["name"] for one in assistant["tool_calls"]] == ["weather", "now"]
    assert assistant["tool_calls"][0]["function"]["arguments"] == json.loads(PARIS)
    assert wet == {"role": "tool", "content": "wet", "tool_call_id": "1"}
    assert noon["content"] == "noon"
    assert [one["id"] for one in again["tool_calls"]] == ["3"]
    assert again["content"] is None
    assert empty["content"] == ""


def test_a_response_can_be_sent_back_as_input(server: Server) -> None:
    server.engine.script = rows(ALL)
    response = server.openai.responses.create(model="tiny", input="Hi", tools=TOOLS)
    items: list[Any] = [one.model_dump() for one in response.output]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "x"} for one in items if "call_id" in one
    ]

    again = server.openai.responses.create(model="tiny", input=[*items, *results], tools=TOOLS)

    assert again.status == "completed"
    assert [one["role"] for one in prompt(server)["messages"]] == ["assistant", "tool", "tool"]


def test_fields_reach_the_template_and_the_engine(server: Server) -> None:
    server.engine.script = rows("x")

    create(
        server,
        temperature=0.5,
        top_p=0.25,
        reasoning={"effort": "low"},
        tools=TOOLS,
        seed=7,
        stop=["END"],
        store=True,
        include=["reasoning.encrypted_content"],
        max_tool_calls=3,
        service_tier="auto",
    )

    params = server.engine.received[-1].params
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, params.text.stop) == (0.5, 0.25, 7, ("END",))
    shown = prompt(server)
    assert shown["effort"] == "low"
    assert shown["tools"][0]["function"] == {
        "name": "weather",
        "description": "Rain?",
        "parameters": WEATHER,
        "strict": True,
    }


def test_a_schema_and_a_forced_call_become_grammars(server: Server) -> None:
    server.engine.script = rows("{}")

    create(server, text={"format": {"type": "json_schema", "name": "x", "schema": WEATHER, "strict": True}})
    schema = server.engine.received[-1].params.sampling.grammar
    create(server, tools=TOOLS, tool_choice={"type": "function", "name": "weather"})
    forced = server.engine.received[-1].params.sampling.grammar

    assert schema is not None
    assert schema.kind == "json_schema"
    assert forced is not None
    assert forced.kind == "lark"


def test_truncation_drops_the_beginning_of_what_does_not_fit(server: Server) -> None:
    server.engine.script = rows("x")
    long = "word " * 2000

    status, error = refused(server, input=long)
    _, too_many = refused(server, input="word", max_output_tokens=5000)
    create(server, input=long, truncation="auto", max_output_tokens=10)

    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert too_many["param"] == "max_output_tokens"
    assert "+ max_output_tokens 5000 > 1024; use max_output_tokens <= " in too_many["message"]
    assert len(server.engine.received[-1].prompt_ids) == server.context.manager.limits.max_req_total_len - 10


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "input", None),
    ({"input": []}, "input", None),
    ({"input": [{"type": "reasoning"}]}, "input", None),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", None),
    ({"input": [{"type": "web_search_call"}]}, "input", None),
    ({"input": [{"type": "compaction_trigger"}]}, "input.0", None),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input.0.call_id", None),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "not_supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0", None),
    ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input.0.content", None),
    ({"temperature": 3}, "temperature", None),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"tools": [{"name": "f"}]}, "tools.0", None),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", None),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", None),
    ({"tool_choice": "maybe"}, "tool_choice", None),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", None),
    ({"background": True, "stream": True}, "background", "not_supported"),
    ({"conversation": "conv_1"}, "conversation", "not_supported"),
    ({"top_logprobs": 21}, "top_logprobs", None),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
    ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", None),
    ({"chat_template": "{{ 1 }}"}, "chat_template", None),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_refused_by_name(server: Server, fields: dict[str, Any], param: str, code: str | None) -> None:
    status, error = refused(server, **fields)

    assert (status, error["param"], error["code"]) == (400, param, code), error


def test_another_model_is_not_found(server: Server) -> None:
    status, error = refused(server, model="gpt-5")

    assert (status, error["code"]) == (404, "model_not_found")


def test_an_error_before_the_first_token_is_a_status_and_after_it_an_event(server: Server) -> None:
    server.engine.script = fails(429, "full")
    early = server.post("/v1/responses", {"input": "Hi", "stream": True})
    server.engine.script = fails(599, "secret", "Hel")
    events = stream(server)

    assert early.status_code == 429
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(last)
    assert last["response"]["output"][0]["status"] == "incomplete"
