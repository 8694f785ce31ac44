"""Tools and reasoning in chats, through the openai client and as the events of a stream."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tokenizers

from lightserve.config import HttpConfig
from lightserve.httpserver.chat.prompt import for_template
from lightserve.httpserver.chat.request import Function, Message, ToolCall
from lightserve.messages.params import FinishReason
from lightserve.model_files import Tokenizer
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME
from test.httpserver.chat.tool_chats import TWO_CALLS, WEATHER
from test.httpserver.fake_engine import Script
from test.httpserver.openai_server import Server, events, rows, running, with_template
from test.real_model import smollm2_tokenizer as smol
from test.text.parsing.corpus import CORPUS, PARIS, call, cut, tagged

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
# what a template shows of a model that thinks and calls tools: <tool_call> </think>
SHOW = (
    "{{ {'messages': messages, 'tools': tools, 'thinks': enable_thinking | default(1), 'old': thinking | default(1)}"
    " | tojson }}{# <tool_call> </think> #}{% if begins_thinking %}<think>\n{% endif %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


@contextmanager
def named(
    tmp_path_factory: pytest.TempPathFactory, parser: str, tokenizer: Tokenizer | None = None
) -> Iterator[Server]:
    config = HttpConfig(tool_call_parser=parser)
    with running(tmp_path_factory.mktemp("run"), tokenizer or with_template("{{ messages }}"), config) as server:
        yield server


def pieces(text: str, size: int = 5) -> Script:
    return rows(*(text[at : at + size] for at in range(0, len(text), size)))


def fold(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream as a client puts them together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            whole = choices.setdefault(piece["index"], {"content": "", "reasoning": "", "calls": [], "logprobs": []})
            delta = piece["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            for one in delta.get("tool_calls", ()):
                fold_call(whole["calls"], one)
            whole["logprobs"] += (piece["logprobs"] or {"content": []})["content"]
            whole["finish_reason"] = piece["finish_reason"]
    return choices


def fold_call(calls: list[list[str]], delta: dict[str, Any]) -> None:
    """A name comes once, with an id and no arguments yet."""
    if "id" in delta:
        assert (delta["index"], delta["type"]) == (len(calls), "function")
        assert delta["function"]["arguments"] == ""
        calls.append([delta["function"]["name"], ""])
    else:
        assert set(delta) == {"index", "function"}
        calls[delta["index"]][1] += delta["function"]["arguments"]


def whole_choices(response: dict[str, Any]) -> dict[int, dict[str, Any]]:
    choices = {}
    for choice in response["choices"]:
        message = choice["message"]
        functions = [one["function"] for one in message.get("tool_calls", ())]
        assert message.get("reasoning") == message.get("reasoning_content")
        choices[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message["reasoning"] or "",
            "calls": [[function["name"], function["arguments"]] for function in functions],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "finish_reason": choice["finish_reason"],
        }
    return choices


def test_tools_are_called_in_a_whole_response(server: Server) -> None:
    server.engine.script = pieces(TWO_CALLS)

    response = server.openai.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)  # type: ignore[list-item]

    [choice] = response.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls: list[Any] = choice.message.tool_calls or []
    assert [(one.type, one.function.name, one.function.arguments) for one in calls] == [
        ("function", "weather", PARIS),
        ("function", "now", "{}"),
    ]
    assert len({one.id for one in calls}) == 2


def test_tools_are_called_in_a_stream(server: Server) -> None:
    server.engine.script = pieces(TWO_CALLS)

    with server.openai.chat.completions.stream(model="tiny", messages=[USER], tools=TOOLS) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_completion().choices[0]

    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Let me see.")
    assert [(one.function.name, one.function.arguments) for one in final.message.tool_calls] == [
        ("weather", PARIS),
        ("now", "{}"),
    ]


def test_content_is_null_where_there_are_calls_only(server: Server) -> None:
    server.engine.script = pieces(tagged(call("now", "{}")))

    message = server.chat(tools=TOOLS).json()["choices"][0]["message"]

    assert list(message) == ["role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls"]
    assert message["content"] is None


BY_NAME = {"function": {"name": "weather"}}


@pytest.mark.parametrize(
    "choice",
    [
        "weather",
        BY_NAME,
        BY_NAME | {"type": None},
        BY_NAME | {"type": "function"},
        {"type": "function", "name": "weather"},
    ],
    ids=str,
)
def test_a_tool_may_be_forced_by_its_bare_name_or_without_a_type(server: Server, choice: Any) -> None:
    server.engine.script = pieces(tagged(call("weather", PARIS)))

    whole = server.chat(tools=TOOLS, tool_choice=choice).json()

    assert [one["function"]["name"] for one in whole["choices"][0]["message"]["tool_calls"]] == ["weather"]
    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert "weather" in grammar.text


def test_the_type_of_a_tool_may_be_left_out(server: Server) -> None:
    server.engine.script = pieces(tagged(call("now", "{}")))

    whole = server.chat(tools=[{"function": {"name": "now"}}]).json()

    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "hidden": {"include_reasoning": False, "logprobs": True},
    "thinking": {"chat_template_kwargs": {"begins_thinking": True}, "n": 2},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_folding_a_stream_gives_the_whole_response(server: Server, option: str) -> None:
    rng = random.Random(option)
    texts = [one.text for one in CORPUS["hermes"] if one.text]
    for _ in range(15):
        text = rng.choice(["", "<think>\nHm,\n 日本\n</think>\n\n", "Hm.</think>"]) + rng.choice(texts)
        server.engine.script = rows(*cut(text, rng))
        whole = {name: value for name, value in OPTIONS[option].items() if name != "stream_options"}

        response = server.chat(tools=TOOLS, **whole).json()
        chunks = events(server.chat(tools=TOOLS, stream=True, **OPTIONS[option]))

        assert fold(chunks) == whole_choices(response)
        if option == "usage":
            assert chunks[-1]["usage"] == response["usage"]


def test_a_call_that_max_tokens_truncates_has_finish_reason_length(server: Server) -> None:
    text = tagged(call("weather", PARIS))[:-30]
    server.engine.script = rows(text, finish=FinishReason.LENGTH)

    [choice] = server.chat(tools=TOOLS).json()["choices"]

    assert choice["finish_reason"] == "length"
    assert PARIS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("ends", [{"finish": FinishReason.LENGTH}, {"stop_reason": "gic"}], ids=["length", "stop"])
def test_a_call_that_is_cut_off_in_its_name_is_shown_nowhere(server: Server, ends: dict[str, Any]) -> None:
    whole_call = tagged(call("now", "{}"))
    server.engine.script = rows("Yes.\n", whole_call, '\n<tool_call>\n{"na', 'me": "ma', **ends)

    [choice] = server.chat(tools=TOOLS).json()["choices"]
    [folded] = fold(events(server.chat(tools=TOOLS, stream=True))).values()

    assert choice["message"]["content"] == folded["content"] == "Yes."
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["now"]
    assert len(folded["calls"]) == 1


def test_a_stop_string_inside_the_arguments_ends_the_call_with_finish_reason_stop(server: Server) -> None:
    text = tagged(call("weather", PARIS))[:-30]
    server.engine.script = rows(text, stop_reason="days")

    [choice] = server.chat(tools=TOOLS, stop="days").json()["choices"]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "days")
    assert PARIS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_a_call_inside_unclosed_reasoning_is_a_call(server: Server) -> None:
    server.engine.script = pieces("<think>\nI must.\n" + tagged(call("now", "{}")))

    response = server.chat(tools=TOOLS).json()

    [choice] = response["choices"]
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("tool_calls", "I must.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_parallel_tool_calls_false_gives_one_call(server: Server) -> None:
    server.engine.script = pieces(TWO_CALLS)

    message = server.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]

    assert [one["function"]["name"] for one in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_content_and_the_template_gets_none(server: Server, fields: dict[str, Any]) -> None:
    server.engine.script = pieces(TWO_CALLS)

    [choice] = server.chat(**fields).json()["choices"]

    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", TWO_CALLS)
    assert shown(server)["tools"] is None


def shown(server: Server) -> Any:
    """What the template was given for the last request."""
    text = smol().decode(server.engine.received[-1].prompt_ids, skip_special_tokens=False)
    return json.loads(text.removesuffix("<think>\n"))


def test_tools_reach_the_template_as_they_were_sent_in_one_order(server: Server) -> None:
    parameters = {"type": "object", "properties": {"a": {"default": None}}}
    function = {"strict": False, "parameters": parameters, "description": "d", "name": "f", "extra": 1}

    server.chat(tools=[{"function": function, "type": "function"}])

    [tool] = shown(server)["tools"]
    assert tool == {"type": "function", "function": function}
    assert list(tool["function"]) == ["name", "description", "parameters", "strict", "extra"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ call.arguments | tojson }}", '{"a": "é"}'),
        ("{{ call.arguments }}", '{"a": "é"}'),
        ("{{ 'x' + call.arguments + 'y' }}", 'x{"a": "é"}y'),
        ("{{ 'x' ~ call.arguments }}", 'x{"a": "é"}'),
        ("{% for k, v in call.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=é"),
        ("{% if call.arguments is string %}s{% elif call.arguments is mapping %}m{% endif %}", "m"),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a":"é"}', {"a": "é"}])
def test_templates_may_take_arguments_as_an_object_or_as_text(template: str, expected: str, arguments: Any) -> None:
    whole = "{% for call in messages[0].tool_calls %}{% set call = call.function %}" + template + "{% endfor %}"
    history = Message(role="assistant", tool_calls=[ToolCall(function=Function(name="f", arguments=arguments))])

    assert with_template(whole).apply_chat_template([for_template(history)]) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if message.content is none %}none{% endif %}", "none"),
        ("x{{ message.content }}y", "xy"),
        ("{{ 'x' + message.content + 'y' }}", "xy"),
        ("x{% if '</think>' in message.content %}{% endif %}{% for part in message.content %}{% endfor %}", "x"),
    ],
)
def test_templates_may_take_no_content_as_none_or_as_an_empty_text(
    tmp_path_factory: pytest.TempPathFactory, template: str, expected: str
) -> None:
    history = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    whole = with_template("{% set message = messages[0] %}" + template)
    with running(tmp_path_factory.mktemp("run"), whole) as server:
        server.chat(messages=[history])

    assert smol().decode(server.engine.received[-1].prompt_ids) == expected


def test_arguments_that_are_not_json_reach_the_template_unchanged(server: Server) -> None:
    calls = [{"id": "c1", "function": {"name": "f", "arguments": "{'a"}}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "not JSON"}

    server.chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": calls}, result])

    assert shown(server)["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{'a"


def test_tools_are_refused_for_a_model_without_a_known_format(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template("{{ tools }}")) as server:
        errors = [
            server.chat(tools=TOOLS, tool_choice=choice).json()["error"]
            for choice in (None, "auto", allowed_tools("auto", "now"))
        ]

    for error in errors:
        assert error["param"] == "tools"
        assert "set --tool_call_parser" in error["message"]
        assert all(name in error["message"] for name in TOOL_FORMATS_BY_NAME)
        assert "tool_choice: required" in error["message"]


def test_the_operator_can_set_the_tool_call_parser(tmp_path_factory: pytest.TempPathFactory) -> None:
    with named(tmp_path_factory, "pythonic") as server:
        server.engine.script = pieces('[weather(city="Paris", days=2)]')
        message = server.chat(tools=TOOLS).json()["choices"][0]["message"]

    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}


# special tokens


def with_special(template: str, *markers: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(smol().to_json())
    backend.add_special_tokens(list(markers))
    return Tokenizer(backend, SpecialTokens(), template)


def test_markers_that_are_special_tokens_stay_in_the_text_for_the_parsers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokenizer = with_special("{# [TOOL_CALLS] #}{{ messages }}", "[TOOL_CALLS]")  # the engine has no row for it
    with running(tmp_path_factory.mktemp("run"), tokenizer) as server:
        server.chat(tools=TOOLS)
        server.chat()

    with_tools, without = (req.params.text for req in server.engine.received)
    assert with_tools.shown_special_ids == (tokenizer.token_to_id("[TOOL_CALLS]"),)
    assert with_tools.skip_special_tokens
    assert without.shown_special_ids == ()


# forced calls


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({"tool_choice": "required"}, TWO_CALLS.removeprefix("Let me see.\n"), "Hello"),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            tagged(call("now", "{}")),
            TWO_CALLS.removeprefix("Let me see.\n"),
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            tagged(call("weather", PARIS)),
            tagged(call("now", "{}")),
        ),
        (
            {"tool_choice": "required", "chat_template_kwargs": {"begins_thinking": True}},
            "Hm.\n</think>\n\n" + tagged(call("now", "{}")),
            tagged(call("now", "{}")),
        ),
    ],
)
def test_a_call_is_forced_by_a_grammar(server: Server, fields: dict[str, Any], allowed: str, refused: str) -> None:
    server.engine.script = pieces(allowed)

    [choice] = server.chat(tools=TOOLS, **fields).json()["choices"]

    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    assert is_allowed(server, allowed)
    assert not is_allowed(server, refused)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary.of(smol()))


def is_allowed(server: Server, text: str) -> bool:
    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    matcher = compiler().compile(grammar)
    return all(matcher.consume_token(token) for token in smol().encode(text)) and bool(matcher.is_accepting())


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_model_gets_only_allowed_tools(server: Server) -> None:
    server.chat(tools=TOOLS, tool_choice=allowed_tools("auto", "now"))

    assert [tool["function"]["name"] for tool in shown(server)["tools"]] == ["now"]
    assert server.engine.received[-1].params.sampling.grammar is None


def test_an_allowed_tool_may_be_required(server: Server) -> None:
    server.chat(tools=TOOLS, tool_choice=allowed_tools("required", "now"))

    assert is_allowed(server, tagged(call("now", "{}")))
    server.chat(tools=TOOLS, tool_choice=allowed_tools("required", "now"))
    assert not is_allowed(server, tagged(call("weather", PARIS)))


@pytest.mark.parametrize(
    ("names", "found"), [(["none such"], "'none such' is not in tools"), ([], "no tool is allowed")]
)
def test_an_allowed_tool_must_be_among_the_tools(server: Server, names: list[str], found: str) -> None:
    response = server.chat(tools=TOOLS, tool_choice=allowed_tools("auto", *names))

    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"tool_choice: {found}"


def test_auto_forces_nothing(server: Server) -> None:
    server.chat(tools=TOOLS, tool_choice="auto")

    assert server.engine.received[-1].params.sampling.grammar is None


def json_call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


# the template ignores the tools, shows them, or has markers of a format that is not known
@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }}{{ tools }}", "{{ messages }}{# <mm:think> #}"])
def test_a_call_is_forced_on_a_model_without_a_known_format(
    tmp_path_factory: pytest.TempPathFactory, template: str
) -> None:
    two = f"{json_call('weather', PARIS)}; {json_call('now', '{}')}"

    with running(tmp_path_factory.mktemp("run"), with_template(template)) as server:
        server.engine.script = pieces(two)
        whole = server.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]
        allows = [is_allowed(server, text) for text in (two, json_call("now", "{}"), json_call("then", "{}"), "Hello")]
        server.engine.script = pieces(json_call("now", "{}"))
        one = server.chat(tools=TOOLS, tool_choice="now", stream=True)
        allows_named = [is_allowed(server, text) for text in (json_call("now", "{}"), json_call("weather", PARIS), two)]

    assert allows == [True, True, False, False]
    assert allows_named == [True, False, False]
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": PARIS},
        {"name": "now", "arguments": "{}"},
    ]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    [streamed] = fold(events(one)).values()
    assert (streamed["calls"], streamed["content"]) == ([["now", "{}"]], "")


def test_the_operator_can_turn_forced_calls_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    with named(tmp_path_factory, "none") as server:
        error = server.chat(tools=TOOLS, tool_choice="required").json()["error"]

    assert (error["param"], error["message"]) == ("tools", "tools: --tool_call_parser none turns them off")


# tools and structured output

SCHEMA = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
STRICT = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]


@pytest.mark.parametrize("fields", [{}, {"chat_template_kwargs": {"begins_thinking": True}}])
def test_the_model_calls_a_tool_or_answers_in_the_schema(server: Server, fields: dict[str, Any]) -> None:
    before = "Hm.\n</think>\n\n" if fields else ""
    calls = TWO_CALLS.removeprefix("Let me see.\n")

    server.engine.script = pieces(before + calls)
    called = server.chat(tools=TOOLS, response_format=FORMAT, **fields).json()["choices"][0]
    server.engine.script = pieces(before + '{"rain": true}')
    answered = server.chat(tools=TOOLS, response_format=FORMAT, **fields).json()["choices"][0]

    assert called["finish_reason"] == "tool_calls"
    assert len(called["message"]["tool_calls"]) == 2
    assert (answered["finish_reason"], answered["message"]["content"]) == ("stop", '{"rain": true}')
    for text in (calls, '{"rain": true}', "<think>Hm.</think>" + calls):
        assert is_allowed(server, before + text) is not (bool(fields) and text.startswith("<think>"))
    for text in ("It rains.", '{"rain": 1}', TWO_CALLS, '{"rain": true}' + calls):
        assert not is_allowed(server, before + text)


def test_parallel_tool_calls_false_allows_one_call_or_an_answer(server: Server) -> None:
    server.chat(tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False)

    assert is_allowed(server, tagged(call("now", "{}")))
    assert is_allowed(server, '{"rain": true}')
    assert not is_allowed(server, TWO_CALLS.removeprefix("Let me see.\n"))


def test_a_forced_call_is_the_whole_output_and_the_format_of_the_answer_has_no_effect(server: Server) -> None:
    server.chat(tools=TOOLS, tool_choice="required", response_format=FORMAT)

    assert is_allowed(server, tagged(call("now", "{}")))
    assert not is_allowed(server, '{"rain": true}')


def test_a_malformed_format_is_refused_with_forced_calls_too(server: Server) -> None:
    error = server.chat(tools=TOOLS, tool_choice="required", response_format={"type": "json_schema"}).json()["error"]

    assert "json_schema.schema" in error["message"]


def test_two_grammars_of_the_answer_are_refused_with_tools_too(server: Server) -> None:
    error = server.chat(tools=TOOLS, response_format=FORMAT, guided_choice=["a"]).json()["error"]

    assert "does not combine" in error["message"]


def test_the_arguments_of_a_strict_tool_follow_its_schema(server: Server) -> None:
    server.chat(tools=STRICT)

    assert is_allowed(server, "Hello")
    assert is_allowed(server, TWO_CALLS)
    assert is_allowed(server, "<think>Hm.</think>" + TWO_CALLS)
    assert is_allowed(server, tagged(call("now", '{"any": [1]}')))  # this tool is not strict
    assert not is_allowed(server, tagged(call("weather", '{"city": 5}')))
    assert not is_allowed(server, tagged(call("then", "{}")))


def test_a_strict_schema_that_no_grammar_can_express_is_refused(server: Server) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "nothing"}}

    error = server.chat(tools=[{"type": "function", "function": function}]).json()["error"]

    assert error["param"] == "tools.0.function.parameters"
    assert "nothing" in error["message"]


def test_strict_tools_in_a_format_without_a_grammar_are_accepted(tmp_path_factory: pytest.TempPathFactory) -> None:
    with named(tmp_path_factory, "pythonic") as server:
        assert server.chat(tools=STRICT).status_code == 200
        assert server.engine.received[-1].params.sampling.grammar is None
        server.chat(tools=STRICT, response_format=FORMAT)

    assert is_allowed(server, '{"rain": true}')
    assert is_allowed(server, "[now()]")
    assert not is_allowed(server, "It rains.")


def test_the_arguments_of_strict_tools_between_tags_follow_their_schema(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n{}</function>\n</tool_call>"
    right, wrong = (call.format(f"<parameter=days>\n{days}\n</parameter>\n") for days in ("2", "two"))
    with named(tmp_path_factory, "qwen3_coder") as server:
        server.chat(tools=STRICT)
        assert is_allowed(server, f"Let me see. {right}")
        assert not is_allowed(server, f"Let me see. {wrong}")
        server.chat(tools=STRICT, response_format=FORMAT)

    assert is_allowed(server, '{"rain": true}')
    assert is_allowed(server, right)
    assert is_allowed(server, "<tool_call>\n<function=now>\n</function>\n</tool_call>")
    assert not is_allowed(server, wrong)
    assert not is_allowed(server, "It rains.")


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [({"type": "nothing"}, "nothing"), (nested(200), "nested")],
)
def test_a_schema_that_cannot_be_forced_is_refused(server: Server, schema: dict[str, Any], reason: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]

    response = server.chat(tools=tools, tool_choice="required")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools.0.function.parameters"
    assert reason in response.json()["error"]["message"]
    assert server.chat(tools=tools).status_code == 200


def test_a_format_without_a_grammar_is_forced_in_json(tmp_path_factory: pytest.TempPathFactory) -> None:
    with named(tmp_path_factory, "glm45") as server:
        server.engine.script = pieces(f'{{"name": "weather", "parameters": {PARIS}}}')
        message = server.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]

    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}


# reasoning

THOUGHT = ["<think>", "\nHm", ", hm.\n", "</think>", "\n\n", "It is", " 4."]


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_separated_and_its_tokens_are_counted(server: Server, is_stream: bool) -> None:
    server.engine.script = rows(*THOUGHT)
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}

    response = server.chat(**options)

    if is_stream:
        chunks = events(response)
        choice, usage = fold(chunks)[0], chunks[-1]["usage"]
        assert [chunk["choices"][0]["delta"] for chunk in chunks[1:3]] == [
            {"reasoning_content": "Hm", "reasoning": "Hm"},
            {"reasoning_content": ", hm.", "reasoning": ", hm."},
        ]
    else:
        choice, usage = whole_choices(response.json())[0], response.json()["usage"]
    assert (choice["reasoning"], choice["content"], choice["finish_reason"]) == ("Hm, hm.", "It is 4.", "stop")
    assert usage["completion_tokens"] == 7
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_an_output_may_begin_inside_reasoning(server: Server) -> None:
    server.engine.script = rows(*THOUGHT[1:])

    response = server.chat(chat_template_kwargs={"begins_thinking": True}).json()

    message = response["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, hm.", "It is 4.")
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_include_reasoning_false_leaves_out_reasoning_and_its_logprobs(server: Server) -> None:
    server.engine.script = rows(*THOUGHT)

    response = server.chat(include_reasoning=False, logprobs=True).json()

    [choice] = response["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "It is 4.",
        "refusal": None,
        "reasoning_content": None,
        "reasoning": None,
    }
    assert len(choice["logprobs"]["content"]) == 3
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_separate_reasoning_false_leaves_reasoning_in_the_content(server: Server) -> None:
    server.engine.script = rows(*THOUGHT)

    response = server.chat(separate_reasoning=False).json()

    assert response["choices"][0]["message"]["content"] == "".join(THOUGHT)


def test_reasoning_effort_none_disables_thinking_in_the_template(server: Server) -> None:
    server.chat(reasoning_effort="none")
    assert (shown(server)["thinks"], shown(server)["old"]) == (False, False)

    server.chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert shown(server)["thinks"] is True

    server.chat(reasoning_effort="low")
    assert shown(server)["thinks"] == 1
