"""Tools of /v1/responses that are not functions: custom, namespace, hosted; and allowed_tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.messages.params import FinishReason
from test.httpserver.chat.tool_chats import WEATHER, prompt
from test.httpserver.openai.test_responses import SHOW, create, fold, refused, stream
from test.httpserver.openai_server import Server, rows, running, with_template

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"hé" \\ 🙂\n*** End Patch\n'
APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"},
}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {"type": "function", "name": "spawn", "strict": False, "parameters": WEATHER, "defer_loading": True},
        {"type": "custom", "name": "note"},
    ],
}
WEATHER_TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": WEATHER}
HOSTED: list[Any] = [
    {"type": kind}
    for kind in (
        "web_search",
        "web_search_preview",
        "image_generation",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "tool_search",
        "local_shell",
        "shell",
    )
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def offered(server: Server) -> list[str]:
    return [tool["function"]["name"] for tool in prompt(server)["tools"] or ()]


def test_hosted_tools_are_left_out_with_a_note(server: Server) -> None:
    server.engine.script = rows("Hi")

    response = create(server, tools=[*HOSTED, WEATHER_TOOL])

    assert offered(server) == ["weather"]
    assert response["tools"] == [WEATHER_TOOL]
    assert [(one["param"], one["type"]) for one in response["ignored"]] == [("tools", one["type"]) for one in HOSTED]
    assert "does not run hosted tools" in response["ignored"][0]["reason"]


def test_hosted_tools_alone_give_a_plain_chat(server: Server) -> None:
    server.engine.script = rows("Hi")

    response = server.openai.responses.create(model="tiny", input="Hi", tools=[{"type": "web_search"}])

    assert (response.output_text, response.tools) == ("Hi", [])
    assert prompt(server)["tools"] is None


def test_a_response_without_such_tools_has_no_note(server: Server) -> None:
    server.engine.script = rows("Hi")

    assert "ignored" not in create(server, tools=[WEATHER_TOOL])


def test_a_custom_tool_is_a_function_with_one_string(server: Server) -> None:
    server.engine.script = rows("Hi")

    create(server, tools=[APPLY_PATCH])

    [tool] = prompt(server)["tools"]
    function = tool["function"]
    assert function["name"] == "apply_patch"
    assert function["description"].startswith("Use the `apply_patch` tool")
    assert function["description"].endswith("lark grammar:\nstart: begin_patch hunk+ end_patch")
    assert function["parameters"]["required"] == ["input"]


def test_the_call_of_a_custom_tool_comes_back_as_its_text(server: Server) -> None:
    server.engine.script = rows(call("apply_patch", input=PATCH))

    response: Any = server.openai.responses.create(model="tiny", input="Hi", tools=[APPLY_PATCH])  # type: ignore[list-item]

    [item] = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert item.id.startswith("ctc_")
    assert item.call_id.startswith("call_")


def test_the_input_of_a_custom_tool_is_streamed(server: Server) -> None:
    text = "Look. " + call("apply_patch", input=PATCH)
    server.engine.script = rows(*(text[at : at + 3] for at in range(0, len(text), 3)))

    with server.openai.responses.stream(model="tiny", input="Hi", tools=[APPLY_PATCH]) as events:  # type: ignore[list-item]
        seen: list[Any] = list(events)
        final: Any = events.get_final_response()

    deltas = [event for event in seen if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event for event in seen if event.type == "response.custom_tool_call_input.done"]
    assert len(deltas) > 10
    assert "".join(event.delta for event in deltas) == done.input == final.output[1].input == PATCH
    assert {event.item_id for event in deltas} == {done.item_id} == {final.output[1].id}
    assert not [event for event in seen if "function_call_arguments" in event.type]


def test_the_input_of_a_custom_tool_may_be_cut(server: Server) -> None:
    text = call("apply_patch", input="one two").partition(" two")[0]
    server.engine.script = rows(text, finish=FinishReason.LENGTH)

    events = stream(server, tools=[APPLY_PATCH])

    [item] = events[-1]["response"]["output"]
    assert (item["input"], item["status"]) == ("one", "incomplete")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_forced_custom_tool_is_forced(server: Server) -> None:
    server.engine.script = rows(call("apply_patch", input="x"))

    create(server, tools=[APPLY_PATCH, WEATHER_TOOL], tool_choice={"type": "custom", "name": "apply_patch"})

    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert "apply_patch" in grammar.text
    assert "weather" not in grammar.text


def test_the_tools_of_a_namespace_are_functions_of_their_own(server: Server) -> None:
    server.engine.script = rows(call("agents__spawn", city="Paris"), call("agents__note", input="a"), call("weather"))

    response = create(server, tools=[NAMESPACE, WEATHER_TOOL])

    assert offered(server) == ["agents__spawn", "agents__note", "weather"]
    assert "defer_loading" not in prompt(server)["tools"][0]["function"]
    assert response["tools"] == [NAMESPACE, WEATHER_TOOL]
    spawn, note, weather = response["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert (note["type"], note["namespace"], note["name"]) == ("custom_tool_call", "agents", "note")
    assert "namespace" not in weather


@pytest.mark.parametrize(("namespace", "name"), [("functions", "f"), ("mcp__x__", "mcp__x__f"), ("a", "a__f")])
def test_the_name_of_a_namespaced_function_is_joined(server: Server, namespace: str, name: str) -> None:
    server.engine.script = rows(call(name))

    response = create(
        server, tools=[{"type": "namespace", "name": namespace, "tools": [{"type": "function", "name": "f"}]}]
    )

    assert offered(server) == [name]
    [item] = response["output"]
    assert (item["namespace"], item["name"]) == (namespace, "f")


def test_a_namespaced_call_in_a_stream_names_its_namespace(server: Server) -> None:
    server.engine.script = rows(call("agents__spawn", city="Paris"))

    events = stream(server, tools=[NAMESPACE])

    assert fold(events) == events[-1]["response"]["output"]
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert (added["item"]["namespace"], added["item"]["name"]) == ("agents", "spawn")


def test_only_allowed_tools_are_offered(server: Server) -> None:
    server.engine.script = rows("Hi")
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
    }

    response = create(server, tools=[WEATHER_TOOL, APPLY_PATCH, {"type": "web_search"}], tool_choice=allowed)

    assert offered(server) == ["weather"]
    assert response["tool_choice"] == allowed
    assert server.engine.received[-1].params.sampling.grammar is None


def test_one_of_the_allowed_tools_is_required(server: Server) -> None:
    server.engine.script = rows(call("apply_patch", input="x"))
    tools = [{"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "spawn", "namespace": "agents"}]

    create(
        server,
        tools=[WEATHER_TOOL, APPLY_PATCH, NAMESPACE],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": tools},
    )

    assert offered(server) == ["apply_patch", "agents__spawn"]
    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert "agents__spawn" in grammar.text
    assert "weather" not in grammar.text


def test_additional_tools_in_the_input_are_tools(server: Server) -> None:
    server.engine.script = rows("Hi")
    tools = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, {"type": "web_search"}]}

    response = create(server, input=[tools, {"role": "user", "content": "Hi"}])

    assert offered(server) == ["agents__spawn", "agents__note"]
    assert [one["type"] for one in response["ignored"]] == ["web_search"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom"}]}, "tools.0.name"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0.tools"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools.0.tools.0"),
    ({"tools": [NAMESPACE, NAMESPACE]}, "tools"),
    ({"tools": [WEATHER_TOOL], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    (
        {
            "tools": [WEATHER_TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
        },
        "tool_choice",
    ),
    ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_tool_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    status, error = refused(server, **fields)

    assert (status, error["param"]) == (400, param), error
