"""The JSON types that a schema allows for an argument."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.output_parsing.argument_types import argument_types

CYCLE: dict[str, Any] = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, {"integer", "string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"minLength": 1}, {"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/City"}, {"string"}),
        ({"$ref": "#/definitions/a~1b"}, {"number"}),
        ({"$ref": "#/$defs/Missing"}, set()),
        ({"$ref": "https://example.com/schema.json"}, set()),
        ({"type": 5, "anyOf": "x", "enum": None}, set()),
        ("string", set()),
    ],
)
def test_the_types_of_an_argument(schema: Any, expected: set[str]) -> None:
    root = {
        "properties": {"a": schema},
        "$defs": {"City": {"type": "string"}},
        "definitions": {"a/b": {"type": "number"}},
    }

    assert argument_types(root, "a") == expected
    assert argument_types({"$ref": "#/$defs/Root", "$defs": {**root["$defs"], "Root": root}}, "b") == set()


@pytest.mark.parametrize("schema", [None, [], {}, {"properties": []}, {"properties": {"b": {}}}, CYCLE])
def test_a_schema_that_does_not_say_allows_any_type(schema: Any) -> None:
    assert argument_types(schema, "a") == set()
