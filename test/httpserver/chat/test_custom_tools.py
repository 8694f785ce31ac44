"""OpenAI's custom tools in a chat: the model calls a function with one string, the client gets the string."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightserve.httpserver.chat.custom_input import CustomCallDecoder
from lightserve.messages.params import FinishReason
from lightserve.text.parsing import CallArguments, CallStart, Content, Delta, merge_deltas
from test.httpserver.chat.test_tools import SHOW, USER, pieces
from test.httpserver.chat.tool_chats import WEATHER, prompt
from test.httpserver.openai_server import Server, events, rows, running, with_template
from test.text.parsing.corpus import PARIS, call, cut, tagged

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"hé" \\ 🙂\n*** End Patch\n'
APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: begin hunk+ end"}},
    },
}
WEATHER_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
HI: list[Any] = [USER]
TOOLS: list[Any] = [APPLY_PATCH, WEATHER_TOOL]
PATCH_CALL = tagged(call("apply_patch", json.dumps({"input": PATCH})))
BOTH = f"Look.\n{PATCH_CALL}\n{tagged(call('weather', PARIS))}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def offered(server: Server) -> list[str]:
    return [tool["function"]["name"] for tool in prompt(server)["tools"] or ()]


def test_the_model_gets_a_function_with_one_string(server: Server) -> None:
    server.engine.script = rows("Hi")

    server.openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)

    tool = prompt(server)["tools"][0]
    assert (tool["type"], tool["function"]["name"]) == ("function", "apply_patch")
    assert (
        tool["function"]["description"]
        == "Edits files.\n\nThe input must match this lark grammar:\nstart: begin hunk+ end"
    )
    assert tool["function"]["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("custom", [{}, {"format": {"type": "text"}}, {"format": None, "description": None}])
def test_a_custom_tool_needs_neither_format_nor_description(server: Server, custom: dict[str, Any]) -> None:
    server.engine.script = rows("Hi")

    response = server.chat(tools=[{"type": "custom", "custom": {"name": "note", **custom}}])

    assert response.status_code == 200
    assert prompt(server)["tools"][0]["function"]["description"] == ""


def test_the_call_of_a_custom_tool_has_its_input_as_text(server: Server) -> None:
    server.engine.script = pieces(BOTH)

    response = server.openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)

    [choice] = response.choices
    patch, weather = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look.")
    assert patch.type == "custom"
    assert (patch.custom.name, patch.custom.input) == ("apply_patch", PATCH)
    assert weather.type == "function"
    assert (weather.function.name, weather.function.arguments) == ("weather", PARIS)


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"stream_options": {"include_usage": True}}, {"n": 2}])
@pytest.mark.parametrize("size", [3, 1000])
def test_the_input_of_a_custom_tool_is_streamed(server: Server, more: dict[str, Any], size: int) -> None:
    server.engine.script = pieces(BOTH, size)

    chunks = server.openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True, **more)

    deltas: list[Any] = [
        one
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == 0
        for one in choice.delta.tool_calls or ()
    ]
    starts = [(one.index, one.type) for one in deltas if one.id]
    inputs = [one.custom["input"] for one in deltas if one.index == 0]
    arguments = [one.function.arguments for one in deltas if one.index == 1]
    assert starts == [(0, "custom"), (1, "function")]
    assert deltas[0].custom == {"name": "apply_patch", "input": ""}
    assert ("".join(inputs), "".join(arguments)) == (PATCH, PARIS)
    assert all(inputs[1:])
    assert len(inputs) > 10 or size == 1000


def test_the_input_of_a_custom_tool_may_be_cut(server: Server) -> None:
    text = tagged(call("apply_patch", '{"input": "one two"}')).partition(" two")[0]
    server.engine.script = rows(text, finish=FinishReason.LENGTH)

    whole = server.chat(tools=TOOLS).json()["choices"][0]
    chunks = events(server.chat(tools=TOOLS, stream=True))

    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["custom"] == {"name": "apply_patch", "input": "one"}
    assert chunks[-1]["choices"][0]["delta"] == {"tool_calls": [{"index": 0, "custom": {"input": "one"}}]}


def test_a_custom_call_and_its_result_are_history(server: Server) -> None:
    server.engine.script = rows("Done.")
    past = {"id": "1", "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "1", "content": "Done!"},
    ]

    server.openai.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)

    _, assistant, result = prompt(server)["messages"]
    function = {"name": "apply_patch", "arguments": {"input": PATCH}}
    assert assistant["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert (result["tool_call_id"], result["content"]) == ("1", "Done!")


def test_a_named_custom_tool_is_forced(server: Server) -> None:
    server.engine.script = pieces(PATCH_CALL)

    response = server.openai.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "custom", "custom": {"name": "apply_patch"}},
    )

    grammar = server.engine.received[-1].params.sampling.grammar
    [patch] = response.choices[0].message.tool_calls or []
    assert grammar is not None
    assert "apply_patch" in grammar.text
    assert "weather" not in grammar.text
    assert patch.type == "custom"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(server: Server, mode: Any) -> None:
    server.engine.script = pieces(PATCH_CALL)
    allowed: list[Any] = [{"type": "custom", "custom": {"name": "apply_patch"}}]

    server.openai.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}},
    )

    assert offered(server) == ["apply_patch"]
    assert (server.engine.received[-1].params.sampling.grammar is not None) == (mode == "required")


def test_a_custom_tool_and_a_function_must_not_have_the_same_name(server: Server) -> None:
    response = server.chat(tools=[APPLY_PATCH, {"type": "function", "function": {"name": "apply_patch"}}])

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


@given(text=st.text(), seed=st.integers(0, 2**32))
def test_any_input_survives_any_cut_between_other_deltas(text: str, seed: int) -> None:
    rng = random.Random(seed)
    arguments: list[Delta] = [CallArguments(1, piece) for piece in cut(json.dumps({"input": text}), rng)]
    other: list[Delta] = [CallArguments(2, PARIS)]
    deltas = [
        CallStart(0, "a", "f"),
        CallStart(1, "b", "note"),
        *arguments,
        CallStart(2, "c", "f"),
        *other,
        Content("x"),
    ]
    decoder = CustomCallDecoder(frozenset({"note"}))

    found = [one for delta in deltas for one in decoder.decode([delta], is_end=False)]
    output = merge_deltas([*found, *decoder.decode([], is_end=True)])

    assert [(one.name, one.is_custom, one.arguments) for one in output.calls] == [
        ("f", False, ""),
        ("note", True, text),
        ("f", False, PARIS),
    ]
    assert output.content == "x"
