"""The schema of a tool's arguments: the JSON types that it allows for each."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.text.json_schema.schema import MAX_STEPS, MAX_VALUES, StepBudget
from lightserve.text.json_schema.tool_schema import ToolSchema
from test.text.json_schema.hostile import list_in_every_argument, names_beside_branches

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

    assert ToolSchema(root).types("a") == expected
    assert ToolSchema({"$ref": "#/$defs/Root", "$defs": {**root["$defs"], "Root": root}}).types("b") == set()


@pytest.mark.parametrize("schema", [None, [], {}, {"properties": []}, {"properties": {"b": {}}}, CYCLE])
def test_a_schema_that_does_not_say_allows_any_type(schema: Any) -> None:
    assert ToolSchema(schema).types("a") == set()


class Counted(dict[str, Any]):
    """A schema that may be looked at a hundred times."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += 1
        assert self.looks < 100, "the same schema was visited again and again"
        return super().get(key, default)


@pytest.mark.parametrize("count", [1, 16])
def test_branches_that_lead_to_the_same_schema_do_not_multiply_the_work(count: int) -> None:
    """Each definition has three branches, which all lead to the next one, and the last to the first."""
    names = [f"#/$defs/d{(i + 1) % count}" for i in range(count)]
    definitions = {f"d{i}": Counted(anyOf=[{"$ref": name}] * 3) for i, name in enumerate(names)}

    assert ToolSchema({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}).types("a") == set()


def test_a_schema_beyond_the_limits_does_not_say_what_an_argument_is() -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"enum": list(range(MAX_VALUES))}}}

    assert ToolSchema(schema).types("a") == set()


def test_an_argument_without_a_schema_may_be_anything() -> None:
    assert ToolSchema({"properties": {"a": None, "b": {"type": "string"}}}).closed_argument("a") == {}


def test_a_schema_is_closed_once() -> None:
    """Some schemas are used for every request."""
    budget = StepBudget()
    schema = ToolSchema({"type": "object"}, budget)
    first, used = schema.closed, budget.used

    assert schema.closed == first
    assert budget.used == used


def test_the_tools_of_a_request_share_its_steps() -> None:
    budget = StepBudget()
    tools = [ToolSchema(names_beside_branches(20, 1000), budget) for _ in range(8)]
    assert tools[0].closed

    with pytest.raises(InvalidRequestError, match=f"more than {MAX_STEPS} steps"):
        assert all(tool.closed for tool in tools)


def test_a_definition_that_all_arguments_have_takes_steps_for_each() -> None:
    schema = ToolSchema(list_in_every_argument(20_000, 500))

    with pytest.raises(InvalidRequestError, match=f"more than {MAX_STEPS} steps"):
        assert all(schema.closed_argument(name) for name in schema.properties)
