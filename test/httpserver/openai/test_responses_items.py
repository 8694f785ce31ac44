"""The history that agents send to /v1/responses: which messages it becomes, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from test.httpserver.chat.tool_chats import ALL, prompt
from test.httpserver.openai.test_responses import SHOW, TOOLS, create, refused
from test.httpserver.openai_server import Server, rows, running, with_template

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        server.engine.script = rows("Hi")
        yield server


def messages(server: Server, *items: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of the prompt after the first, of the user."""
    create(server, input=[USER, *items])
    shown: list[dict[str, Any]] = prompt(server)["messages"]
    return shown[1:]


LEFT_OUT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
    {"type": "computer_call", "id": "cu_1", "call_id": "1", "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "1", "output": {"type": "computer_screenshot"}},
    {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "x"}},
    {"type": "tool_search_output", "call_id": "1", "status": "completed", "execution": "client", "tools": []},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"},
    {"type": "context_compaction", "encrypted_content": "gAAA"},
]


def test_items_without_text_are_left_out_with_a_note(server: Server) -> None:
    response = create(server, input=[USER, *LEFT_OUT])

    assert len(prompt(server)["messages"]) == 1
    assert [(one["param"], one["type"]) for one in response["ignored"]] == [
        (f"input[{index}]", item["type"]) for index, item in enumerate(LEFT_OUT, 1)
    ]


def test_a_custom_call_and_its_output_are_a_call_and_a_result(server: Server) -> None:
    call, result = messages(
        server,
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "1", "name": "apply_patch", "input": 'a\n"b"'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done!"},
    )

    [one] = call["tool_calls"]
    assert one["function"] == {"name": "apply_patch", "arguments": {"input": 'a\n"b"'}}
    assert result == {"role": "tool", "content": "Done!", "tool_call_id": "1"}


def test_a_namespaced_call_has_the_name_that_the_model_wrote(server: Server) -> None:
    [call] = messages(
        server, {"type": "function_call", "call_id": "1", "namespace": "agents", "name": "spawn", "arguments": "{}"}
    )

    assert call["tool_calls"][0]["function"]["name"] == "agents__spawn"


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments", "text"),
    [
        (
            {"type": "local_shell_call", "id": "lsh_1", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"},
            "local_shell",
            {"type": "exec", "command": ["ls"]},
            "a.txt",
        ),
        (
            {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls", "rm b"]}},
            {
                "type": "shell_call_output",
                "call_id": "1",
                "output": [
                    {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                    {"stdout": "", "stderr": "no b", "outcome": {"type": "exit", "exit_code": 1}},
                ],
            },
            "shell",
            {"commands": ["ls", "rm b"]},
            "a.txt\nno b",
        ),
        (
            {"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "1", "status": "completed"},
            "apply_patch",
            {"type": "delete_file", "path": "a"},
            "",
        ),
    ],
)
def test_a_tool_of_the_client_is_a_call_and_a_result(
    server: Server, call: dict[str, Any], output: dict[str, Any], name: str, arguments: Any, text: str
) -> None:
    shown, result = messages(server, call, output)

    [one] = shown["tool_calls"]
    assert one["function"] == {"name": name, "arguments": arguments}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", text, one["id"])


@pytest.mark.parametrize(
    ("item", "name", "text"),
    [
        (
            {"type": "mcp_call", "id": "1", "name": "f", "server_label": "s", "arguments": "{}", "output": "wet"},
            "s__f",
            "wet",
        ),
        ({"type": "mcp_call", "id": "1", "name": "f", "arguments": "{}", "error": "down"}, "f", "error: down"),
        (
            {
                "type": "file_search_call",
                "id": "1",
                "queries": ["x"],
                "results": [{"filename": "a.md", "text": "found"}],
            },
            "file_search",
            "a.md\nfound",
        ),
        (
            {"type": "code_interpreter_call", "id": "1", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
            "code_interpreter",
            "2",
        ),
    ],
)
def test_a_hosted_call_with_text_is_a_call_and_its_result(
    server: Server, item: dict[str, Any], name: str, text: str
) -> None:
    call, result = messages(server, item)

    assert call["tool_calls"][0]["function"]["name"] == name
    assert (result["role"], result["content"]) == ("tool", text)


def test_reasoning_of_another_server_is_its_summary(server: Server) -> None:
    assistant = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}
    summary = [{"type": "summary_text", "text": "Hm."}]

    [with_summary] = messages(
        server, {"type": "reasoning", "summary": summary, "encrypted_content": "gAAA", "content": None}, assistant
    )
    [opaque] = messages(server, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, assistant)

    assert with_summary["reasoning_content"] == "Hm."
    assert "reasoning_content" not in opaque


def test_reasoning_comes_back_as_encrypted_content(server: Server) -> None:
    """A client may send it back without the text."""
    server.engine.script = rows(ALL)
    response = create(server, include=["reasoning.encrypted_content"], tools=TOOLS)
    server.engine.script = rows("Hi")
    thought, *rest = response["output"]
    assert thought["content"][0]["text"] == "Hm."

    [again, *_] = messages(server, {"type": "reasoning", "summary": [], **_only(thought, "encrypted_content")}, *rest)
    assert again["reasoning_content"] == "Hm."
    [text, *_] = messages(server, {"type": "reasoning", "summary": [], **_only(thought, "content")}, *rest)
    assert text == again


def _only(item: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: item[name]}


@pytest.mark.parametrize("encrypted", ["lightserve.%%%", "lightserve./w==", "lightserve.", "gAAA", ""])
def test_bad_encrypted_content_is_no_reasoning(server: Server, encrypted: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": encrypted}

    [message] = messages(server, item, {"role": "assistant", "content": "x"})

    assert "reasoning_content" not in message


def test_reasoning_without_include_is_not_encrypted(server: Server) -> None:
    server.engine.script = rows(ALL)

    response = create(server)

    server.engine.script = rows("Hi")
    assert "encrypted_content" not in response["output"][0]


def test_an_image_in_the_output_of_a_tool_is_named_in_text(server: Server) -> None:
    output = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]

    _, result = messages(
        server,
        {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    )

    assert result["content"] == "Look:\n[input_image left out: this model does not read it]"


def test_messages_may_have_a_phase_and_a_refusal(server: Server) -> None:
    content = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]

    [message] = messages(
        server,
        {"type": "message", "role": "assistant", "phase": "commentary", "status": "completed", "content": content},
    )

    assert message == {"role": "assistant", "content": "a\nno"}


def test_messages_between_agents_are_messages_of_the_user(server: Server) -> None:
    [message] = messages(
        server,
        {"type": "agent_message", "author": "a", "recipient": "b", "content": [{"type": "input_text", "text": "x"}]},
    )

    assert message == {"role": "user", "content": "x"}


def test_an_unknown_type_of_item_is_refused_with_the_known_ones(server: Server) -> None:
    status, error = refused(server, input=[{"type": "telepathy"}])

    assert (status, error["param"]) == (400, "input.0")
    assert "custom_tool_call" in error["message"]


def test_fields_of_agents_are_accepted(server: Server) -> None:
    response = create(
        server,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="01a1",
        service_tier="priority",
        client_metadata={"a": "b"},
        text={"verbosity": "low"},
        reasoning={"effort": "medium", "summary": "auto", "context": "auto"},
        stream_options={"include_obfuscation": False},
        safety_identifier="x",
        max_tool_calls=3,
        store=False,
    )

    assert response["prompt_cache_key"] == "01a1"
    assert response["service_tier"] == "default"
    assert json.loads(json.dumps(response["text"])) == {"verbosity": "low"}
