"""The limits of a schema, and where its references lead."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.text.json_schema.schema import MAX_BRANCHES, MAX_LEVELS, MAX_NESTING, MAX_VALUES, JsonSchema
from test.cpu_time import growth
from test.text.json_schema.hostile import (
    STRING,
    chain_of_branches,
    chain_of_objects,
    chain_of_references,
    every_object_in_every_other,
    nested,
)

BEYOND = {
    "3,000 references in allOf": (chain_of_branches(3000), f"more than {MAX_LEVELS} levels deep"),
    "1,000 objects": (chain_of_objects(1000), f"more than {MAX_LEVELS} levels deep"),
    "3,000 references": (chain_of_references(3000), f"more than {MAX_LEVELS} levels deep"),
    "many levels of JSON": (nested(MAX_NESTING + 1), f"nested more than {MAX_NESTING} levels deep"),
    "100,000 levels of JSON": (nested(100_000), f"nested more than {MAX_NESTING} levels deep"),
    "many values": ({"enum": list(range(MAX_VALUES))}, f"more than {MAX_VALUES} values"),
    "many branches": ({"anyOf": [STRING] * (MAX_BRANCHES + 1)}, f"anyOf has {MAX_BRANCHES + 1} schemas"),
    "many branches inside": ({"items": {"oneOf": [STRING] * (MAX_BRANCHES + 1)}}, f"limit is {MAX_BRANCHES}"),
}
WITHIN = {
    "a chain of branches": chain_of_branches(300),
    "a chain of objects": chain_of_objects(300),
    "a schema of itself": {"$ref": "#"},
    "two schemas of each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "every object in every other": every_object_in_every_other(100),
    "levels of JSON": nested(MAX_NESTING),
    "branches": {"anyOf": [STRING] * MAX_BRANCHES},
    "values": {"enum": list(range(MAX_VALUES - 2))},
    "malformed parts": {"anyOf": 1, "properties": [], "$ref": 5, "allOf": {"a": 1}, "items": "x", "$defs": None},
    "no object": [[], 1],
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_schema_beyond_a_limit_is_refused_by_the_name_of_the_limit(name: str) -> None:
    schema, message = BEYOND[name]

    with pytest.raises(InvalidRequestError, match=message):
        JsonSchema(schema).check()


@pytest.mark.parametrize("name", WITHIN)
def test_a_schema_within_the_limits_is_accepted(name: str) -> None:
    JsonSchema(WITHIN[name]).check()


@pytest.mark.parametrize("make", [chain_of_branches, chain_of_objects, chain_of_references])
def test_the_limits_are_checked_in_linear_time(make: Any) -> None:
    schemas = {count: make(count) for count in (100, 400)}

    def check(count: int) -> None:
        for _ in range(20):
            JsonSchema(schemas[count]).check()

    assert growth(check, 400) < 8


DOCUMENT: dict[str, Any] = {
    "$defs": {"City": {"type": "string"}, "a/b": {"type": "number"}, "c%d": {"type": "null"}, "e~f": {"type": "array"}},
    "anyOf": [{"type": "integer"}, {"type": "boolean"}],
}


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        ("#/$defs/City", "string"),
        ("#/$defs/a~1b", "number"),
        ("#/$defs/e~0f", "array"),
        ("#/%24defs/City", "string"),
        ("#/$defs/c%25d", "null"),
        ("#/anyOf/1", "boolean"),
        ("#/anyOf/2", None),
        ("#/anyOf/" + "9" * 5000, None),
        ("#/anyOf/x", None),
        ("#/$defs/Town", None),
        ("#/$defs/City/type", None),
        ("#City", None),
        ("https://example.com/schema.json", None),
        ("file:///etc/passwd", None),
        (5, None),
    ],
)
def test_a_reference_leads_to_a_part_of_the_same_document(reference: Any, kind: str | None) -> None:
    assert JsonSchema(DOCUMENT).resolve({"$ref": reference}).get("type") == kind


def test_a_chain_of_references_is_resolved_to_its_end() -> None:
    schema = chain_of_references(2000)

    assert JsonSchema(schema).resolve(schema) == STRING


@pytest.mark.parametrize("name", ["a schema of itself", "two schemas of each other"])
def test_a_cycle_of_references_leads_nowhere(name: str) -> None:
    schema = JsonSchema(WITHIN[name])

    assert schema.resolve(schema.root) == {}
    assert schema.resolve(schema.root) == {}
