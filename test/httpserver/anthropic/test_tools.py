"""Tools of /v1/messages: hosted ones, those whose schema Anthropic documents, deferred ones, and very many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from test.httpserver.anthropic.test_messages import SHOW, TOOLS, USER, client_of, create, post
from test.httpserver.chat.tool_chats import WEATHER, prompt
from test.httpserver.openai_server import Server, rows, running, with_template

WEB: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
LATER: Any = {"name": "later", "description": "Much.", "input_schema": WEATHER, "defer_loading": True}
CALL = '<tool_call>\n{"name": "later", "arguments": {"city": "Paris"}}\n</tool_call>'
FOUND: Any = [
    USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {"q": "later"}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "1",
                "content": [{"type": "tool_reference", "tool_name": "later"}],
            }
        ],
    },
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        server.engine.script = rows("x")
        yield server


def names(server: Server) -> list[str]:
    """The tools that the chat template gets."""
    return [tool["function"]["name"] for tool in prompt(server)["tools"] or ()]


@pytest.mark.parametrize(
    "hosted",
    [
        WEB,
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ],
    ids=lambda tool: tool["type"],
)
def test_a_hosted_tool_is_left_out_and_logged(
    server: Server, hosted: dict[str, Any], log: pytest.LogCaptureFixture
) -> None:
    create(server, tools=[*TOOLS, hosted], container="c")

    assert names(server) == ["weather", "now"]
    assert f"only Anthropic's servers have it: {hosted['type']}, container" in log.text


def test_a_request_with_hosted_tools_alone_has_no_tools(server: Server) -> None:
    create(server, tools=[WEB])

    assert names(server) == []


def test_a_hosted_tool_cannot_be_forced(server: Server) -> None:
    response = post(server, tools=[WEB, *TOOLS], tool_choice={"type": "tool", "name": "web_search"})

    assert response.status_code == 400
    assert "only Anthropic's servers run 'web_search'" in response.json()["error"]["message"]


def test_a_tool_can_be_forced_on_a_model_without_a_known_format(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template("{{ messages }}")) as plain:
        plain.engine.script = rows('{"name": "now", "parameters": {}}')
        forced = post(plain, tools=TOOLS, tool_choice={"type": "any"}).json()
        body = {"model": "tiny", "messages": [USER], "tools": TOOLS}
        counted = plain.post("/v1/messages/count_tokens", body | {"tool_choice": {"type": "tool", "name": "now"}})
        free = post(plain, tools=TOOLS)

    (block,) = forced["content"]
    assert (forced["stop_reason"], block["type"], block["name"], block["input"]) == ("tool_use", "tool_use", "now", {})
    usage = forced["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert free.status_code == 400
    assert "set --tool_call_parser" in free.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bash_20250124", {"command", "restart"}),
        ("text_editor_20250728", {"command", "path", "old_str", "new_str", "insert_line", "insert_text"}),
        ("text_editor_20250124", {"command", "path", "old_str", "new_str", "insert_line"}),
        ("memory_20250818", {"command", "path", "old_path", "new_path"}),
    ],
)
def test_a_tool_that_the_client_runs_has_its_documented_schema(server: Server, kind: str, fields: set[str]) -> None:
    create(server, tools=[{"type": kind, "name": "its_name", "max_characters": 100}])

    [tool] = prompt(server)["tools"]
    assert tool["function"]["name"] == "its_name"
    assert fields <= set(tool["function"]["parameters"]["properties"])


@pytest.mark.parametrize("version", ["20241022", "20250124", "20250429", "20250728"])
def test_only_old_editors_can_undo(server: Server, version: str) -> None:
    create(server, tools=[{"type": f"text_editor_{version}", "name": "edit"}])

    commands = prompt(server)["tools"][0]["function"]["parameters"]["properties"]["command"]["enum"]
    assert ("undo_edit" in commands) == (version < "20250429")


def test_a_deferred_tool_is_left_out_until_a_search_finds_it(server: Server) -> None:
    server.engine.script = rows(CALL)

    create(server, tools=[*TOOLS, LATER])
    before = names(server)
    response = create(server, tools=[*TOOLS, LATER], messages=FOUND)

    assert before == names(server) == ["weather", "now"]  # the beginning of the prompt stays the same
    result = prompt(server)["messages"][-1]["content"]
    assert result.startswith("The tool later is available now:")
    assert '"description":"Much."' in result
    assert [(block["name"], block["input"]) for block in response["content"]] == [("later", {"city": "Paris"})]


def test_a_definition_is_shown_once_however_often_a_search_finds_it(server: Server) -> None:
    create(server, tools=[*TOOLS, LATER], messages=[*FOUND, *FOUND])

    results = [one["content"] for one in prompt(server)["messages"] if one["role"] == "tool"]
    assert results[0].startswith("The tool later is available now:")
    assert results[1] == "The tool later is available."


def test_a_tool_that_is_not_deferred_is_only_named_by_its_reference(server: Server) -> None:
    create(server, tools=[*TOOLS, LATER | {"defer_loading": False}], messages=FOUND)

    assert names(server) == ["weather", "now", "later"]
    assert prompt(server)["messages"][-1]["content"] == "The tool later is available."


@pytest.mark.parametrize("search", [[], [*TOOLS, {"type": "tool_search_tool_bm25", "name": "search"}]])
def test_deferred_tools_that_no_client_searches_are_in_the_prompt(server: Server, search: list[Any]) -> None:
    create(server, tools=[*search, LATER])

    assert "later" in names(server)


def test_a_thousand_tools_are_accepted_and_more_are_refused(server: Server) -> None:
    tools = [{"name": f"t{i}", "input_schema": {}} for i in range(1025)]

    counted = server.post("/v1/messages/count_tokens", {"messages": [USER], "tools": tools[:1024]})
    many = post(server, tools=tools)

    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 10_000
    assert many.status_code == 400
    assert "at most 1024" in many.json()["error"]["message"]


def test_fields_of_a_tool_are_accepted_and_examples_are_shown(server: Server) -> None:
    fields = {"eager_input_streaming": True, "strict": True, "allowed_callers": ["direct"], "defer_loading": False}
    tool = TOOLS[0] | fields | {"input_examples": [{"city": "Paris"}]}

    create(server, tools=[tool])

    [shown] = prompt(server)["tools"]
    assert shown["function"] == {
        "name": "weather",
        "description": 'Rain?\nExamples of input:\n{"city":"Paris"}',
        "parameters": WEATHER,
        "strict": True,
    }


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "computer_20250124", "name": "computer"}, "whose results are images, is not supported yet"),
        ({"type": "telepathy_20250124", "name": "x"}, "the type of a tool must be custom"),
        ({"type": "bash_now", "name": "x"}, "tools.0"),
        ({"type": "bash_20250124"}, "tools.0.name"),
    ],
)
def test_a_tool_of_an_unknown_kind_is_refused(server: Server, tool: dict[str, Any], named: str) -> None:
    response = post(server, tools=[tool])

    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_the_tool_runner_of_the_client_calls_a_tool(server: Server) -> None:
    calls = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        calls.append(city)
        server.engine.script = rows("Wet.")
        return "rain"

    server.engine.script = rows('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    runner = client_of(server).beta.messages.tool_runner(
        model="tiny", max_tokens=64, messages=[USER], tools=[weather], betas=["context-management-2025-06-27"]
    )
    final: Any = runner.until_done()

    assert calls == ["Paris"]
    assert final.content[0].text == "Wet."
    assert prompt(server)["messages"][-1] == {"role": "tool", "content": "rain", "tool_call_id": final_call(server)}


def final_call(server: Server) -> str:
    call: str = prompt(server)["messages"][1]["tool_calls"][0]["id"]
    return call


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_a_value_that_is_nested_too_deeply_is_refused(server: Server) -> None:
    found = {"type": "web_search_tool_result", "tool_use_id": "1", "content": nested(300)}
    bodies: list[tuple[str, Any]] = [
        ("messages", {"messages": [{"role": "assistant", "content": [found]}]}),
        ("tools", {"tools": [TOOLS[0] | {"input_examples": [nested(300)]}]}),
        ("tools", {"tools": [*TOOLS, LATER | {"input_schema": nested(300)}], "messages": FOUND}),
    ]

    for param, body in bodies:
        response = post(server, **body)

        assert response.status_code == 400, body
        assert response.json()["error"]["message"].startswith(f"{param}: a value is nested too deeply")
