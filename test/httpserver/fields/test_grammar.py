"""Every field for structured output becomes one grammar, and a bad grammar never reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar.specs import schema_grammar, structural_tag_grammar
from test.httpserver.openai_server import Server, rows, running

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_SPEC = schema_grammar(SCHEMA)
LENIENT_SPEC = schema_grammar(SCHEMA, is_strict=False)
JSON_OBJECT = GrammarSpec("json_object")
REGEX = GrammarSpec("regex", "a+")
CHOICE = GrammarSpec("choice", '["a", "b"]')
GBNF = 'root ::= "a"'
EBNF = GrammarSpec("ebnf", GBNF)
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TAG_SPEC = structural_tag_grammar(TAG)


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


OPENAI: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ({"regular_constraint": "", "guided_grammar": "", "guided_json": ""}, None),
    ({"structured_outputs": {}}, None),
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA_SPEC),
    ({"response_format": named(SCHEMA, strict=True)}, SCHEMA_SPEC),
    ({"response_format": named(SCHEMA)}, schema_grammar(SCHEMA, is_strict=False)),
    ({"response_format": named({"uniqueItems": True})}, schema_grammar({"uniqueItems": True}, is_strict=False)),
    ({"response_format": {"type": "structural_tag", **TAG}}, TAG_SPEC),
    ({"response_format": {"type": "json", "value": SCHEMA}}, LENIENT_SPEC),
    ({"response_format": {"type": "json", "value": json.dumps(SCHEMA)}}, LENIENT_SPEC),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, LENIENT_SPEC),
    ({"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, LENIENT_SPEC),
    ({"response_format": {"type": "regex", "value": "a+"}}, REGEX),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_SPEC),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA_SPEC),
    ({"structured_outputs": {"regex": "a+"}}, REGEX),
    ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE),
    ({"structured_outputs": {"grammar": GBNF}}, EBNF),
    ({"structured_outputs": {"json_object": True}}, JSON_OBJECT),
    ({"structured_outputs": {"structural_tag": TAG}}, TAG_SPEC),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, TAG_SPEC),
    ({"guided_json": SCHEMA}, SCHEMA_SPEC),
    ({"guided_json": {}}, schema_grammar({})),
    ({"guided_regex": "a+"}, REGEX),
    ({"guided_choice": ["a", "b"]}, CHOICE),
    ({"guided_grammar": GBNF}, EBNF),
    ({"regular_constraint": "a+"}, REGEX),
    ({"json_schema": json.dumps(SCHEMA)}, SCHEMA_SPEC),
    ({"regex": "a+"}, REGEX),
    ({"ebnf": GBNF}, EBNF),
    ({"grammar": GBNF}, EBNF),
]
GENERATES: list[tuple[dict[str, Any], GrammarSpec]] = [
    ({"guided_json": SCHEMA}, SCHEMA_SPEC),
    ({"guided_json": json.dumps(SCHEMA)}, SCHEMA_SPEC),
    ({"guided_grammar": GBNF}, EBNF),
    ({"regular_constraint": "a+"}, REGEX),
    ({"grammar": {"type": "json", "value": SCHEMA}}, SCHEMA_SPEC),
    ({"grammar": {"type": "json", "value": json.dumps(SCHEMA)}}, SCHEMA_SPEC),
    ({"grammar": {"type": "json_object", "value": SCHEMA}}, SCHEMA_SPEC),
    ({"grammar": {"type": "regex", "value": "a+"}}, REGEX),
    ({"grammar": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, SCHEMA_SPEC),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        server.engine.script = rows("ok")
        yield server


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize(("fields", "expected"), OPENAI, ids=lambda value: str(value)[:60])
def test_a_field_of_openai_vllm_or_sglang_becomes_a_grammar(
    server: Server, path: str, fields: dict[str, Any], expected: GrammarSpec | None
) -> None:
    response = server.chat(**fields) if path == CHAT else server.complete(**fields)

    assert response.status_code == 200, response.text
    assert server.engine.received[-1].params.sampling.grammar == expected


@pytest.mark.parametrize(("parameters", "expected"), GENERATES, ids=lambda value: str(value)[:60])
def test_a_parameter_of_lightllm_or_tgi_becomes_a_grammar(
    server: Server, parameters: dict[str, Any], expected: GrammarSpec
) -> None:
    response = server.post(GENERATE, {"inputs": "Hi", "parameters": parameters})

    assert response.status_code == 200, response.text
    assert server.engine.received[-1].params.sampling.grammar == expected


@pytest.mark.parametrize("kind", ["json", "regex"])
def test_a_type_of_tgi_needs_its_value(server: Server, kind: str) -> None:
    response = server.chat(response_format={"type": kind})

    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"response_format: the type {kind} needs value"


def test_two_grammars_are_refused_by_the_name_of_the_second(server: Server) -> None:
    response = server.chat(guided_json={}, response_format={"type": "json_object"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert "does not combine with guided_json" in response.json()["error"]["message"]


def test_a_beam_search_refuses_a_grammar(server: Server) -> None:
    response = server.complete(guided_regex="a", use_beam_search=True, n=2)

    assert response.status_code == 400
    assert "does not combine with a beam search" in response.json()["error"]["message"]


def test_a_bad_grammar_is_refused_before_a_stream_begins(server: Server) -> None:
    received = len(server.engine.received)

    response = server.chat(response_format=named({"type": "nothing"}, strict=True), stream=True)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert len(server.engine.received) == received
