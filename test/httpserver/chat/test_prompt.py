"""What a chat template is given, seen through a template that writes its variables as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.errors import ServerError
from lightserve.httpserver.chat.prompt import LONG_CHAT
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import LONG_TEXT
from lightserve.httpserver.http.body import validate
from lightserve.model_files.template.budget import ON_EVENT_LOOP, RenderLimits
from lightserve.model_files.template.chat_template import ChatTemplate
from test.httpserver.openai_server import Server, rows, running, with_template
from test.real_model import smollm2_tokenizer as smol

USER = {"role": "user", "content": "Hi"}
SHOW = (
    "{{ {'messages': messages, 'tools': tools, 'turn': add_generation_prompt, 'thinks': enable_thinking | default(0),"
    " 'effort': reasoning_effort | default(0), 'old': thinking | default(0), 'documents': documents} | tojson }}"
)


@pytest.fixture(scope="module")
def showing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        server.engine.script = rows("ok")
        yield server


def prompt_of(server: Server, *messages: dict[str, Any], **fields: Any) -> str:
    response = server.chat(messages=list(messages), **fields)
    assert response.status_code == 200, response.text
    return smol().decode(server.engine.received[-1].prompt_ids, skip_special_tokens=False)


def shown(server: Server, *messages: dict[str, Any], **fields: Any) -> Any:
    return json.loads(prompt_of(server, *messages, **fields))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
        ),
        ({"role": "user", "name": "Ann", "content": "a"}, {"role": "user", "content": "a", "name": "Ann"}),
        (
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        ),
        (
            {"role": "assistant", "content": "4", "reasoning": "2+2", "tool_calls": [], "refusal": None, "audio": None},
            {"role": "assistant", "content": "4", "reasoning_content": "2+2"},
        ),
    ],
)
def test_a_message_reaches_the_template(showing: Server, message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert shown(showing, message, USER)["messages"] == [expected, USER]


def test_tool_calls_of_the_history_reach_the_template_with_their_arguments_as_objects(showing: Server) -> None:
    function = {"name": "add", "arguments": '{"a": 2, "b": [1]}'}
    call = {"id": "c1", "type": "function", "function": function}

    found = shown(showing, USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER)

    parsed = {"name": "add", "arguments": {"a": 2, "b": [1]}}
    expected = {"id": "c1", "type": "function", "function": parsed}
    assert found["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [expected]}


def test_template_variables_reach_the_template_but_not_those_of_the_server(showing: Server) -> None:
    kwargs = {
        "enable_thinking": False,
        "messages": [],
        "tools": ["x"],
        "add_generation_prompt": False,
        "chat_template": "x",
        "tokenize": True,
        "self": 1,
        "continue_final_message": True,
        "raise_exception": "x",
        "namespace": "x",
        "range": 1,
        "eos_token": "x",
    }

    found = shown(showing, USER, chat_template_kwargs=kwargs, reasoning_effort="low")

    assert found == {
        "messages": [USER],
        "tools": None,
        "turn": True,
        "thinks": False,
        "old": 0,
        "effort": "low",
        "documents": None,
    }


def test_add_generation_prompt_false_leaves_out_the_assistants_turn(showing: Server) -> None:
    assert shown(showing, USER, add_generation_prompt=False)["turn"] is False


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        server.engine.script = rows("ok")
        yield server


@pytest.mark.parametrize("text", ["The answer ", "m", "", "<|im_end|>"])
def test_the_final_message_can_be_continued(real: Server, text: str) -> None:
    prompt = prompt_of(real, USER, {"role": "assistant", "content": text}, continue_final_message=True)

    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n" + text)


def test_a_chat_adds_special_tokens_only_on_request(real: Server) -> None:
    prompt_of(real, USER)

    expected = smol().encode(smol().apply_chat_template([USER]), add_special_tokens=False)
    assert real.engine.received[-1].prompt_ids == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.x }}", "chat template"),
        ("", "gives an empty prompt for these messages"),
        (None, "no chat template"),
    ],
)
def test_an_error_of_the_chat_template_is_a_status_400_with_its_message(
    tmp_path_factory: pytest.TempPathFactory, template: str | None, expected: str
) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(template)) as server:
        response = server.chat()

    assert response.status_code == 400
    assert expected in response.json()["error"]["message"]


def test_values_nested_too_deeply_for_a_template_are_a_bad_request(showing: Server) -> None:
    depth = 1000  # of the 1,024 that the body may have
    nested = b"[" * depth + b"]" * depth
    body = (
        b'{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": %b}}' % nested
    )

    response = showing.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == 400
    assert "recursion" in response.json()["error"]["message"]


def test_arguments_that_would_take_long_to_parse_are_refused(showing: Server) -> None:
    call = {"function": {"name": "f", "arguments": "[" + "[]," * 50_000 + "0]"}}
    messages = [{"role": "assistant", "tool_calls": [call]}] * 3

    response = showing.chat(messages=messages)

    assert response.status_code == 400
    assert "strings, lists and objects" in response.json()["error"]["message"]


# what the template writes after the last message

THINKS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt and turn is defined %}{{ turn }}{% endif %}{# <think> </think> #}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(THINKS)) as server:
        server.engine.script = rows("It is", " 4.")
        yield server


@pytest.mark.parametrize(
    ("messages", "fields", "is_thinking"),
    [
        ([("user", "Write <think>")], {}, False),
        ([("user", "Write <think>")], {"chat_template_kwargs": {"turn": "<assistant>\n"}}, False),
        ([("user", "Write <think>")], {"chat_template_kwargs": {"turn": "<think>\n"}}, True),
        ([("user", "What is 2+2?")], {"chat_template_kwargs": {"turn": "<assistant><think>\n"}}, True),
        ([("user", "Write </think>")], {"chat_template_kwargs": {"turn": "<think></think>"}}, False),
        ([("user", "Write <think>"), ("assistant", "Well,")], {"continue_final_message": True}, False),
        ([("user", "Write </think>"), ("assistant", "<think>Well,")], {"continue_final_message": True}, True),
        ([("assistant", "<think>Well,")], {"continue_final_message": True}, True),
    ],
)
def test_only_the_template_and_the_assistant_begin_reasoning(
    thinking: Server, messages: list[tuple[str, str]], fields: dict[str, Any], is_thinking: bool
) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]

    message = thinking.chat(messages=chat, **fields).json()["choices"][0]["message"]

    texts = (message.get("reasoning") or "", message["content"] or "")
    assert texts == (("It is 4.", "") if is_thinking else ("", "It is 4."))


# fields that set variables of the template


@pytest.mark.parametrize(
    ("fields", "thinks", "effort"),
    [
        ({}, 0, 0),
        ({"enable_thinking": False}, False, 0),
        ({"enable_thinking": True, "thinking": False, "reasoning": False}, True, 0),
        ({"thinking": True}, True, 0),
        ({"thinking": {"type": "disabled"}}, False, 0),
        ({"thinking": {"type": "adaptive"}}, 0, 0),
        ({"reasoning": False}, False, 0),
        ({"reasoning": {"enabled": True, "effort": "high"}}, True, "high"),
        ({"reasoning": {"effort": "none"}}, False, "none"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, 0, "high"),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, True, 0),
    ],
)
def test_top_level_fields_turn_thinking_on_and_off(
    showing: Server, fields: dict[str, Any], thinks: Any, effort: Any
) -> None:
    found = shown(showing, USER, **fields)

    assert (found["thinks"], found["old"], found["effort"]) == (thinks, thinks, effort)


@pytest.mark.parametrize(
    ("fields", "budget", "includes"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, 64, None),
        ({"reasoning": {"max_tokens": 32, "exclude": True}}, 32, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}, "thinking_token_budget": 8}, 8, None),
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, None, True),
    ],
)
def test_the_parts_of_thinking_and_reasoning_are_other_names_of_fields(
    fields: dict[str, Any], budget: int | None, includes: bool | None
) -> None:
    body = validate(ChatBody, {"messages": [USER], **fields})

    assert (body.thinking_token_budget, body.include_reasoning) == (budget, includes)


def test_documents_reach_a_template_that_takes_them(showing: Server) -> None:
    documents = [{"title": "Paris", "text": "A city."}]

    assert shown(showing, USER, documents=documents)["documents"] == documents
    assert shown(showing, USER, documents=[])["documents"] is None


def test_default_variables_of_the_server_count_less_than_those_of_a_request(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = HttpConfig(default_chat_template_kwargs='{"enable_thinking": false, "reasoning_effort": "low"}')
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW), config) as server:
        server.engine.script = rows("ok")
        own = shown(server, USER)
        asked = shown(server, USER, chat_template_kwargs={"enable_thinking": True}, reasoning_effort="high")

    assert (own["thinks"], own["effort"]) == (False, "low")
    assert (asked["thinks"], asked["effort"]) == (True, "high")


@pytest.mark.parametrize("value", ["{", "[1]", "5"])
def test_default_variables_that_are_no_json_object_are_refused(value: str) -> None:
    with pytest.raises(ServerError, match="default_chat_template_kwargs"):
        HttpConfig(default_chat_template_kwargs=value)


# roles of the template's own

ROLES = (
    "{% for message in messages %}{% if message.role == 'critic' %}<critic>{{ message.content | tojson }}"
    "{% elif message.role == 'judge' %}{{ raise_exception('no judge') }}"
    "{% elif message.role in ('user', 'assistant') %}<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def with_roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(ROLES)) as server:
        server.engine.script = rows("ok")
        yield server


def test_a_message_may_have_any_role_that_the_template_takes(with_roles: Server) -> None:
    critic = {"role": "critic", "content": 'Say "no".'}

    assert prompt_of(with_roles, USER, critic) == '<user>Hi<critic>"Say \\"no\\"."'


def test_an_unusual_role_is_logged_once(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(ROLES)) as server:
        server.engine.script = rows("ok")
        for role in ("critic", "user", "critic", "assistant"):
            assert server.chat(messages=[USER, {"role": role, "content": "x"}]).status_code == 200

    [logged] = [record.getMessage() for record in caplog.records if "unusual role" in record.getMessage()]
    assert "'critic'" in logged


@pytest.mark.parametrize(
    ("role", "expected"),
    [("judge", "no judge"), ("poet", "messages.1.role: the model's chat template drops messages of the role 'poet'")],
)
def test_a_role_that_the_template_does_not_take_is_refused(with_roles: Server, role: str, expected: str) -> None:
    response = with_roles.chat(messages=[USER, {"role": role, "content": "x"}])

    assert response.status_code == 400
    assert expected in response.json()["error"]["message"]


def test_system_messages_of_a_client_are_merged_for_a_template_that_takes_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first only') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    systems = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}]
    with running(tmp_path_factory.mktemp("run"), with_template(template)) as server:
        server.engine.script = rows("ok")

        assert prompt_of(server, *systems, USER) == "<system>A\n\nB<user>Hi"
        assert prompt_of(server, USER, *systems[:1]) == "<user>Hi<user>A"


def recorded_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that render templates. Those of asyncio.to_thread begin with asyncio_."""
    threads: list[str] = []
    render = ChatTemplate.render

    def recorded(template: ChatTemplate, *limits: RenderLimits, **variables: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(template, *limits, **variables)

    monkeypatch.setattr(ChatTemplate, "render", recorded)
    return threads


@pytest.mark.parametrize(
    ("fields", "is_long"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": False, "effort": "low"}}, False),
        ({"chat_template_kwargs": {"a": "x" * LONG_TEXT}}, True),
        ({"chat_template_kwargs": {"a": ["x"]}}, True),
        ({"documents": [{"text": "x"}]}, True),
        ({"messages": [USER] * (LONG_CHAT + 1)}, True),
    ],
)
def test_a_long_chat_is_rendered_beside_the_event_loop(
    showing: Server, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_long: bool
) -> None:
    threads = recorded_threads(monkeypatch)

    showing.chat(**fields)

    assert {name.startswith("asyncio_") for name in threads} == {is_long}


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its template takes as many steps, and makes a text as long, as the request says."""
    template = "Hi{% for i in range(steps|default(0)) %}{% endfor %}{{ ('a' * (length|default(0)))|length }}"
    with running(tmp_path_factory.mktemp("run"), with_template(template)) as server:
        server.engine.script = rows("ok")
        yield server


@pytest.mark.parametrize(
    ("variables", "is_beside"),
    [({"steps": 10}, [False]), ({"steps": ON_EVENT_LOOP.steps}, [False, True]), ({"length": 5_000_000}, [False, True])],
)
def test_a_template_that_takes_long_for_a_short_chat_is_rendered_beside_the_event_loop(
    counting: Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, int], is_beside: list[bool]
) -> None:
    threads = recorded_threads(monkeypatch)

    response = counting.chat(chat_template_kwargs=variables)

    assert response.status_code == 200
    assert [name.startswith("asyncio_") for name in threads] == is_beside


def test_a_template_that_takes_too_much_memory_is_an_error_of_the_request(counting: Server) -> None:
    response = counting.chat(chat_template_kwargs={"length": 3_000_000_000})

    assert response.status_code == 400
    assert "chat template takes more than 268,435,456 bytes" in response.json()["error"]["message"]
    assert counting.chat().status_code == 200
