"""Content blocks of /v1/messages in the prompt: what Claude Code and Anthropic's SDK send beside text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from test.httpserver.anthropic.test_messages import SHOW, TOOLS, USER, client_of, create, post
from test.httpserver.chat.tool_chats import THOUGHT, prompt
from test.httpserver.openai_server import Server, rows, running, with_template

# Mistral's and Gemma's templates refuse a system message that is not the first
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{% endfor %}" + SHOW
)
RULES: Any = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        server.engine.script = rows("x")
        yield server


def messages_of(server: Server, *messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The messages that the chat template gets."""
    create(server, messages=list(messages), **fields)
    shown: list[dict[str, Any]] = prompt(server)["messages"]
    return shown


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize("system", ["x-anthropic-billing-header: cc_version=2.1; cch={};\nBe kind.", None])
def test_the_billing_header_is_no_part_of_the_prompt(server: Server, system: str | None) -> None:
    prompts = []
    for hashed in ("a1b2c", "d3e4f"):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={hashed};"
        blocks = [text(header), text("Be kind.")] if system is None else system.format(hashed)
        create(server, system=blocks)
        prompts.append(server.engine.received[-1].prompt_ids)

    assert prompts[0] == prompts[1]
    assert prompt(server)["messages"][0] == {"role": "system", "content": "Be kind."}


def test_a_late_system_message_keeps_its_role_where_the_template_takes_it(server: Server) -> None:
    shown = messages_of(server, RULES, USER, {"role": "system", "content": [text("Hurry.")]}, system="Be kind.")

    assert shown == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        USER,
        {"role": "system", "content": "Hurry."},
    ]


def test_a_late_system_message_is_the_users_where_the_template_refuses_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(STRICT)) as strict:
        strict.engine.script = rows("x")
        shown = messages_of(strict, USER, RULES, assistant(text("x")), USER, system="Be kind.")

    first = {"role": "user", "content": "Hi\n<system-reminder>\nBe brief.\n</system-reminder>"}
    assert shown == [{"role": "system", "content": "Be kind."}, first, {"role": "assistant", "content": "x"}, USER]


def test_messages_of_the_user_in_a_row_are_one(server: Server) -> None:
    assert messages_of(server, USER, user(text("there"))) == [{"role": "user", "content": "Hi\nthere"}]


def test_a_failed_tool_says_so(server: Server) -> None:
    def result(content: str, **fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "1", "content": content, **fields}
        [shown] = messages_of(server, user(block))
        assert shown["role"] == "tool"
        found: str = shown["content"]
        return found

    assert result("No such file", is_error=True) == "Error: No such file"
    assert result("<tool_use_error>No such file</tool_use_error>", is_error=True).startswith("<tool_use_error>")
    assert result("No such file", is_error=False) == result("No such file") == "No such file"


def test_documents_and_search_results_are_text(server: Server) -> None:
    paper = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rain."}, "title": "W"}
    inner = {"type": "document", "source": {"type": "content", "content": [text("Snow.")]}, "context": "Winter"}
    found = {"type": "search_result", "source": "http://a", "title": "A", "content": [text("Sun.")]}

    [asked] = messages_of(server, user(paper, text("Well?")))
    [told] = messages_of(server, user({"type": "tool_result", "tool_use_id": "1", "content": [inner, found]}))

    assert asked["content"] == "<document>\nW\nRain.\n</document>\nWell?"
    assert told["content"] == (
        "<document>\nWinter\nSnow.\n</document>\n<search_result>\nA\nhttp://a\nSun.\n</search_result>"
    )


SERVER_RESULTS: list[tuple[str, Any, str]] = [
    (
        "web_search_tool_result",
        [{"type": "web_search_result", "title": "T", "url": "http://a", "encrypted_content": "secret"}],
        '{"title":"T","url":"http://a"}',
    ),
    ("web_search_tool_result", {"type": "web_search_tool_result_error", "error_code": "unavailable"}, "unavailable"),
    (
        "web_fetch_tool_result",
        {
            "type": "web_fetch_result",
            "url": "http://a",
            "content": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rain."}},
        },
        "Rain.",
    ),
    (
        "code_execution_tool_result",
        {"type": "code_execution_result", "stdout": "3\n", "stderr": "", "return_code": 0, "content": []},
        '"return_code":0',
    ),
    (
        "bash_code_execution_tool_result",
        {"type": "bash_code_execution_result", "stdout": "a", "stderr": "", "return_code": 1, "content": []},
        '"stdout":"a"',
    ),
    (
        "text_editor_code_execution_tool_result",
        {"type": "text_editor_code_execution_view_result", "content": "line", "file_type": "text"},
        '"content":"line"',
    ),
    (
        "tool_search_tool_result",
        {
            "type": "tool_search_tool_search_result",
            "tool_references": [{"type": "tool_reference", "tool_name": "weather"}],
        },
        "weather",
    ),
    ("mcp_tool_result", [{"type": "text", "text": "done"}], "done"),
    ("mcp_tool_result", "done", "done"),
]


@pytest.mark.parametrize(("kind", "content", "shown"), SERVER_RESULTS, ids=[one[0] for one in SERVER_RESULTS])
def test_a_call_of_a_servers_tool_is_a_call_with_its_result(
    server: Server, kind: str, content: Any, shown: str
) -> None:
    use = "mcp_tool_use" if kind.startswith("mcp") else "server_tool_use"
    turn = assistant(
        text("Let me see."),
        {"type": use, "id": "srv1", "name": "search", "input": {"q": "a"}},
        {"type": kind, "tool_use_id": "srv1", "content": content},
        text("So."),
    )

    _, call, result, answer, _ = messages_of(server, USER, turn, USER)

    assert call["content"] == "Let me see."
    assert call["tool_calls"][0]["function"] == {"name": "search", "arguments": {"q": "a"}}
    assert (result["role"], result["tool_call_id"]) == ("tool", "srv1")
    assert shown in result["content"]
    assert "secret" not in result["content"]
    assert answer == {"role": "assistant", "content": "So."}


def test_a_conversation_that_ends_with_a_servers_result_is_continued_with_a_new_message(server: Server) -> None:
    turn = assistant(
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
    )

    assert [one["role"] for one in messages_of(server, USER, turn)] == ["user", "assistant", "tool"]
    assert prompt(server)["turn"] is True


def test_thinking_comes_back_with_its_signature_and_is_reasoning_again(server: Server) -> None:
    client = client_of(server)
    server.engine.script = rows(f"{THOUGHT}x")

    whole: Any = client.messages.create(model="tiny", max_tokens=64, messages=[USER])
    with client.messages.stream(model="tiny", max_tokens=64, messages=[USER]) as stream:
        streamed: Any = stream.get_final_message()
    client.messages.create(model="tiny", max_tokens=64, messages=[USER, streamed.to_param(), USER])
    _, turn, _ = prompt(server)["messages"]

    assert streamed.content[0].thinking == whole.content[0].thinking == turn["reasoning_content"] == "Hm."
    assert streamed.content[0].signature == whole.content[0].signature != ""
    assert turn["content"] == "x"


def test_blocks_that_say_nothing_to_the_model_are_left_out(server: Server) -> None:
    hidden: Any = [{"type": "redacted_thinking", "data": "x"}, {"type": "fallback", "from": {}, "to": {}}]

    _, turn, _ = messages_of(server, USER, assistant(*hidden, text("x")), USER)

    assert turn == {"role": "assistant", "content": "x"}


def test_cache_control_is_allowed_everywhere(server: Server) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{**text("wet"), **mark}], **mark}
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {}, **mark}
    fields = {"system": [{**text("Be kind."), **mark}], "tools": [TOOLS[0] | mark], **mark}

    plain = messages_of(server, user({**text("Hi"), **mark}), assistant(use), user(result), **fields)

    assert "ephemeral" not in json.dumps(plain)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
BAD: list[tuple[dict[str, Any], str]] = [
    (user(IMAGE), "an image is not supported yet"),
    (user({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}), "an image is not supported yet"),
    (assistant({"type": "mcp_tool_result", "tool_use_id": "1", "content": [IMAGE]}), "'image' is not supported yet"),
    (user(PDF), "a document with a source of type 'base64' is not supported yet"),
    (user({"type": "document", "source": {}}), "a document needs a source"),
    (user({"type": "container_upload", "file_id": "f"}), "this server stores no files"),
    (user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "x"}]}), "must be one of text"),
    (user({"type": "server_tool_use", "id": "1", "name": "f", "input": {}}), "only allowed in a message of the"),
    (user({"type": "web_search_tool_result", "tool_use_id": "1", "content": []}), "only allowed in a message of the"),
    ({"role": "system", "content": [PDF]}, "only allowed in a message of the user"),
    (user({"type": "tool_reference", "tool_name": "x"}), "a content block must be one of"),
]


@pytest.mark.parametrize(("message", "named"), BAD, ids=lambda value: str(value)[:80])
def test_a_block_that_cannot_be_shown_is_refused(server: Server, message: dict[str, Any], named: str) -> None:
    response = post(server, messages=[message])

    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_a_block_of_system_must_be_text(server: Server) -> None:
    for block, named in ((IMAGE, "'image' is not supported yet"), ({"type": "text"}, "must have the type 'text'")):
        response = post(server, system=[block])

        assert response.status_code == 400
        assert named in response.json()["error"]["message"]
