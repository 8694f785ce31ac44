"""Objects that name their properties are closed: what the grammar allows, compared with a validator's view."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import permutations
from typing import Any

import jsonschema_rs
import pytest

from lightserve.errors import InvalidRequestError
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.specs import schema_grammar
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from lightserve.text.json_schema.closing import closed_schema
from lightserve.text.json_schema.schema import MAX_STEPS, JsonSchema
from test.cpu_time import cpu_seconds
from test.small_text import small_tokenizer
from test.text.json_schema.hostile import (
    chain_of_branches,
    chain_of_objects,
    equal_objects_in_branches,
    every_object_in_every_other,
    every_object_of_every_other,
    names_beside_branches,
)

TOKENIZER = small_tokenizer()
COMPILER = GrammarCompiler(GrammarVocabulary.of(TOKENIZER))
STRING = {"type": "string"}
NAMES = ("a", "b", "c", "x")


def allows(schema: dict[str, Any], value: Any, is_strict: bool = False) -> bool:
    """Whether the grammar of the schema accepts exactly this value."""
    matcher = COMPILER.compile(schema_grammar(schema, is_strict))
    return matcher.consume_tokens(TOKENIZER.encode(json.dumps(value))) and matcher.is_accepting()


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A, B, C = of(a=STRING), of(b=STRING), of(c=STRING)
DEFINITIONS = {"$defs": {"A": A, "B": B, "Both": {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}}}
REF_A, REF_B, REF_BOTH = ({"$ref": f"#/$defs/{name}"} for name in ("A", "B", "Both"))
# schema: the sets of names of the objects that it allows; "x" is named nowhere
OBJECTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "properties": (of(a=STRING, b=STRING), {"", "a", "b", "ab"}),
    "no properties": (of(), {""}),
    "nothing said": ({"type": "object"}, {"", "a", "b", "c", "x", "ab", "ac", "ax", "bc", "bx", "cx"}),
    "a reference": (REF_A, {"", "a"}),
    "a reference with a description": ({**REF_A, "description": "x"}, {"", "a"}),
    "a reference beside properties": ({**REF_A, **B}, {"", "a", "b", "ab"}),
    "allOf with one": ({"allOf": [REF_A], "default": None}, {"", "a"}),
    "allOf": ({"allOf": [REF_A, B]}, {"", "a", "b", "ab"}),
    "allOf beside properties": ({**C, "allOf": [REF_A, B]}, {"", "a", "b", "c", "ab", "ac", "bc"}),
    "allOf of allOf": ({"allOf": [REF_BOTH, C]}, {"", "a", "b", "c", "ab", "ac", "bc"}),
    "anyOf": ({"anyOf": [REF_A, B]}, {"", "a", "b"}),
    "anyOf beside properties": ({**C, "anyOf": [REF_A, B]}, {"", "a", "b", "c", "ac", "bc"}),
    "anyOf that requires": (
        {**of(a=STRING, b=STRING), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"a", "b", "ab"},
    ),
    "anyOf and oneOf": ({"anyOf": [A, C], "oneOf": [B]}, {"", "a", "b", "c", "ab", "bc", "ac"}),
    "allOf that requires": ({"allOf": [REF_A, {"required": ["a"]}]}, {"a"}),
    "a required name that is no property": ({**A, "required": ["b"]}, {"b", "ab"}),
    "then": ({**A, "if": B, "then": C}, {"", "a", "c", "ac"}),
    "additionalProperties": (
        {**A, "additionalProperties": True},
        {"", "a", "b", "c", "x", "ab", "ac", "ax", "bc", "bx", "cx"},
    ),
    "additionalProperties false": ({**A, "additionalProperties": False}, {"", "a"}),
    "additionalProperties in allOf": (
        {"allOf": [{**A, "additionalProperties": STRING}, B]},
        {"", "a", "b", "c", "x", "ab", "ac", "ax", "bc", "bx", "cx"},
    ),
    "patternProperties": (
        {**A, "patternProperties": {"^x": STRING}, "additionalProperties": False},
        {"", "a", "x", "ax"},
    ),
    "unevaluatedProperties": ({"allOf": [A], "unevaluatedProperties": False}, {"", "a"}),
    "unevaluatedProperties beside properties": (
        {**B, "allOf": [A], "unevaluatedProperties": False},
        {"", "a", "b", "ab"},
    ),
    "unevaluatedProperties beside anyOf": (
        {**C, "anyOf": [A, B], "unevaluatedProperties": False},
        {"", "a", "b", "c", "ac", "bc"},
    ),
    "more properties than it names": ({**A, "required": ["a"], "minProperties": 2}, {"ab", "ac", "ax"}),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_has_only_the_properties_that_its_schema_names(name: str) -> None:
    schema, expected = OBJECTS[name]
    schema = DEFINITIONS | schema
    objects = [names for count in range(3) for names in permutations(NAMES, count)]

    allowed = {"".join(sorted(names)) for names in objects if allows(schema, dict.fromkeys(names, "z"))}

    assert allowed == expected
    for names in allowed - {""}:
        if name != "then":  # no grammar can express that
            jsonschema_rs.validate(schema, dict.fromkeys(names, "z"))


@pytest.mark.parametrize(
    "wrap", ["properties", "items", "prefixItems", "additionalProperties", "anyOf", "allOf", "$ref"]
)
def test_objects_inside_are_closed_too(wrap: str) -> None:
    schemas: dict[str, Any] = {
        "properties": of(b=A),
        "items": {"type": "array", "items": A},
        "prefixItems": {"type": "array", "prefixItems": [A]},
        "additionalProperties": {"type": "object", "additionalProperties": A},
        "anyOf": {"type": "array", "items": {"anyOf": [A, {"type": "null"}]}},
        "allOf": {"allOf": [of(b=A), C]},
        "$ref": {**of(b={"$ref": "#/$defs/A"}), **DEFINITIONS},
    }

    def value(inner: Any) -> Any:
        return [inner] if wrap in ("items", "prefixItems", "anyOf") else {"b": inner}

    assert allows(schemas[wrap], value({"a": "z"}))
    assert not allows(schemas[wrap], value({"a": "z", "x": "z"}))
    assert not allows(schemas[wrap], value({"x": "z"}))


def test_two_schemas_of_one_inner_object_leave_it_possible() -> None:
    """If each were closed, nothing would fit both."""
    schema = {"allOf": [{**of(a=of(b=STRING)), "required": ["a"]}, of(a={**of(c=STRING), "required": ["c"]})]}

    assert allows(schema, {"a": {"b": "z", "c": "z"}})
    assert not allows(schema, {"a": {"b": "z"}})
    assert not allows(schema, {"a": {"c": "z"}, "x": "z"})


def test_the_properties_of_a_branch_do_not_come_in_another_branch() -> None:
    def branch(kind: str, inner: Any) -> dict[str, Any]:
        return {**of(a={"const": kind}, b=inner), "required": ["a", "b"]}

    schema = {**of(a=STRING), "oneOf": [branch("x", of(x=STRING)), branch("y", of(y=STRING))]}

    assert allows(schema, {"a": "x", "b": {"x": "z"}})
    assert allows(schema, {"a": "y", "b": {"y": "z"}})
    assert not allows(schema, {"a": "x", "b": {"y": "z"}})
    assert not allows(schema, {"a": "y", "b": {"y": "z", "x": "z"}})


def test_unevaluated_properties_are_enforced_in_a_strict_schema() -> None:
    """llguidance does not know the keyword."""
    for schema in ({**B, "allOf": [A]}, {**C, "anyOf": [A, B]}, {"allOf": [A]}):
        assert allows({**schema, "unevaluatedProperties": False}, {"a": "z"}, is_strict=True)


def test_a_schema_may_refer_to_itself() -> None:
    schema = {**of(a=STRING, b={"$ref": "#"}), "required": ["a"]}

    assert allows(schema, {"a": "x", "b": {"a": "y", "b": {"a": "z"}}})
    assert not allows(schema, {"a": "x", "b": {"a": "y", "c": "z"}})


def test_a_key_cannot_be_repeated() -> None:
    matcher = COMPILER.compile(schema_grammar(of(a=STRING, b=STRING)))

    assert not matcher.consume_tokens(TOKENIZER.encode('{"a": "x", "a'))


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {**DEFINITIONS, **C, "allOf": [REF_B, REF_A]}

    assert allows(schema, {"c": "z", "b": "z", "a": "z"})
    assert not allows(schema, {"a": "z", "b": "z", "c": "z"})


@pytest.mark.parametrize("negated", ["not", "if"])
def test_what_a_value_need_not_fit_is_not_closed(negated: str) -> None:
    schema = {"items": A, negated: {"items": of(b=STRING)}}

    assert closed_schema(JsonSchema(schema))[negated] == schema[negated]


def test_references_lead_to_the_definitions_that_are_used() -> None:
    closed = closed_schema(JsonSchema({**of(a={"$ref": "#/properties/b"}, b={"enum": [1]}), **DEFINITIONS}))

    jsonschema_rs.validate(closed, {"a": 1})
    assert len(closed["$defs"]) == 1


@pytest.mark.parametrize(
    "schema", [chain_of_branches(300), chain_of_objects(300), every_object_in_every_other(50)], ids=len
)
def test_many_references_take_steps_in_proportion_to_the_schema(schema: dict[str, Any]) -> None:
    read = JsonSchema(schema)

    closed_schema(read)

    assert read.budget.used < len(json.dumps(schema)) / 4


def test_schemas_that_are_combined_in_too_many_ways_are_refused() -> None:
    links = {f"d{i}": {**of(**{f"p{i}": STRING}), "allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(400)}
    everywhere = of(**{f"x{i}": {"$ref": f"#/$defs/d{i}"} for i in range(400)})

    with pytest.raises(InvalidRequestError, match=f"more than {MAX_STEPS} steps"):
        closed_schema(JsonSchema({**everywhere, "$defs": {**links, "d400": STRING}}))


@pytest.mark.parametrize(
    "schema",
    [
        every_object_of_every_other(150, "allOf"),
        every_object_of_every_other(150, "anyOf"),
        names_beside_branches(40, 1000, length=10_000),
        equal_objects_in_branches(7000, 1000),
    ],
    ids=["allOf", "anyOf", "long names", "equal objects"],
)
def test_no_schema_takes_much_longer_to_close_than_a_large_one(schema: dict[str, Any]) -> None:
    large = every_object_in_every_other(100)

    def close(one: dict[str, Any]) -> None:
        with suppress(InvalidRequestError):
            json.dumps(closed_schema(JsonSchema(one)))

    assert cpu_seconds(lambda: close(schema)) < 10 * cpu_seconds(lambda: close(large))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 1},
        {"properties": {"a": 1}, "required": "a"},
        {"allOf": 1, "properties": {}, "anyOf": [{"properties": {}}]},
        {"anyOf": {}, "properties": {}},
        {"$ref": "#/$defs/none", "properties": {"a": {}}},
        {"$ref": 7},
        {"minProperties": "x", "properties": {}},
    ],
    ids=str,
)
def test_a_malformed_schema_is_the_compilers_to_refuse(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="the grammar cannot be used"):
        COMPILER.compile(schema_grammar(schema))
