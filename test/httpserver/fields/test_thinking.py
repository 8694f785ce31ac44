"""The thinking limit reaches the engine under every name, and a grammar applies after the reasoning."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.messages.params import GrammarSpec, ThinkingLimit
from lightserve.messages.request import GenerateReq
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from test.httpserver.openai_server import Server, rows, running, with_template
from test.real_model import smollm2_tokenizer as smol

TEMPLATE = "{{ messages }}{# </think> #}{% if begins_thinking %}<think>\n{% endif %}"
THOUGHT = ["<think>", "Hm", ".", "</think>", "It is", " 4."]
END_IDS = tuple(smol().encode("</think>", add_special_tokens=False))
USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER]}
MESSAGES = {"messages": [USER], "max_tokens": 50}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(TEMPLATE)) as server:
        yield server


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model does not reason."""
    with running(tmp_path_factory.mktemp("run"), with_template("{{ messages }}")) as server:
        yield server


@pytest.fixture
def server(thinker: Server) -> Server:
    thinker.engine.script = rows(*THOUGHT)
    thinker.engine.received.clear()
    return thinker


def received(server: Server, path: str, body: dict[str, Any]) -> GenerateReq:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return server.engine.received[-1]


def limit(max_tokens: int, is_begun: bool = False) -> ThinkingLimit:
    return ThinkingLimit(max_tokens, "<think>", "</think>", END_IDS, is_begun)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"thinking_token_budget": 9}),
        ("/v1/chat/completions", CHAT | {"thinking_budget": 9}),
        ("/v1/chat/completions", CHAT | {"max_reasoning_tokens": 9, "thinking_budget": 20, "stream": True}),
        ("/v1/chat/completions", CHAT | {"thinking_budget": 9, "separate_reasoning": False, "n": 2}),
        ("/v1/responses", {"input": "Hi", "reasoning": {"max_tokens": 9}}),
        ("/v1/responses", {"input": "Hi", "thinking_token_budget": 9}),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        ("/v1/messages", MESSAGES | {"thinking_budget": 9}),
    ],
)
def test_every_name_of_a_limit_reaches_the_engine(server: Server, path: str, body: dict[str, Any]) -> None:
    assert received(server, path, body).params.sampling.thinking == limit(9)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"thinking_budget": -1, "max_reasoning_tokens": None}),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "disabled", "budget_tokens": 9}}),
    ],
)
def test_without_a_budget_there_is_no_thinking_limit(server: Server, path: str, body: dict[str, Any]) -> None:
    assert received(server, path, body).params.sampling.thinking is None


def test_a_prompt_may_begin_the_reasoning(server: Server) -> None:
    begun = CHAT | {"thinking_budget": 0, "chat_template_kwargs": {"begins_thinking": True}}
    continued = {
        "messages": [USER, {"role": "assistant", "content": "<think>Well"}],
        "continue_final_message": True,
        "thinking_budget": 3,
    }

    assert received(server, "/v1/chat/completions", begun).params.sampling.thinking == limit(0, is_begun=True)
    assert received(server, "/v1/chat/completions", continued).params.sampling.thinking == limit(3, is_begun=True)


def test_a_reasoning_parser_set_by_a_flag_counts(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = HttpConfig(reasoning_parser="<a>,</a>")
    with running(tmp_path_factory.mktemp("run"), with_template("{{ messages }}"), config) as server:
        found = received(server, "/v1/chat/completions", CHAT | {"thinking_budget": 5}).params.sampling.thinking

    assert found == ThinkingLimit(5, "<a>", "</a>", tuple(smol().encode("</a>")), is_begun=False)


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "max_reasoning_tokens"])
def test_a_thinking_limit_is_refused_for_a_model_that_does_not_reason(other: Server, name: str) -> None:
    response = other.post("/v1/chat/completions", CHAT | {name: 5})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert "--reasoning_parser" in response.json()["error"]["message"]


def test_anthropics_thinking_budget_is_ignored_for_a_model_that_does_not_reason(other: Server) -> None:
    body = MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 2048}}

    assert received(other, "/v1/messages", body).params.sampling.thinking is None


@pytest.mark.parametrize("value", [-2, 1.5, True, "5", 2**31])
def test_a_limit_is_a_number_of_tokens(server: Server, value: Any) -> None:
    response = server.post("/v1/chat/completions", CHAT | {"thinking_budget": value})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_budget"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, '{"a": 5}'),
    ({"response_format": {"type": "json_object"}}, '{"b": []}'),
    ({"regex": "[0-9]+"}, "123"),
    ({"guided_choice": ["yes", "no"]}, "no"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | b\nb ::= "bb"'}}, "bb"),
    ({"guided_grammar": 'start: "a" | b\nb: "bb"'}, "bb"),
]


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary.of(smol()))


def is_allowed(grammar: GrammarSpec | None, text: str) -> bool:
    assert grammar is not None
    matcher = compiler().compile(grammar)
    return all(matcher.consume_token(token) for token in smol().encode(text)) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("fields", "response"), STRUCTURED)
def test_a_grammar_applies_after_the_reasoning(server: Server, fields: dict[str, Any], response: str) -> None:
    free = received(server, "/v1/chat/completions", CHAT | fields).params.sampling.grammar
    variables = {"chat_template_kwargs": {"begins_thinking": True}}
    begun = received(server, "/v1/chat/completions", CHAT | fields | variables).params.sampling.grammar

    assert is_allowed(free, response)
    assert is_allowed(free, f"<think>Hm, {{ 1 or 2?\n</think>\n\n{response}")
    assert is_allowed(begun, f"Hm, {{ 1 or 2?\n</think>\n\n{response}")
    assert not is_allowed(begun, response)
    for grammar in (free, begun):
        assert not is_allowed(grammar, f"<think>Hm</think>Well: {response}")
        assert not is_allowed(grammar, "<think>Hm")


def test_a_grammar_covers_reasoning_where_it_is_part_of_the_content(server: Server) -> None:
    body = CHAT | {"regex": "[0-9]+", "separate_reasoning": False}

    assert received(server, "/v1/chat/completions", body).params.sampling.grammar == GrammarSpec("regex", "[0-9]+")


def test_a_grammar_after_thinking_that_is_wrong_is_refused(server: Server) -> None:
    response = server.post("/v1/chat/completions", CHAT | {"regex": "(a"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "regex"


def test_a_beam_search_refuses_a_thinking_limit(server: Server) -> None:
    response = server.post("/v1/chat/completions", CHAT | {"thinking_budget": 5, "num_beams": 2, "max_tokens": 5})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_token_budget"
