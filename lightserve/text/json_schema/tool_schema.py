"""The schema of a tool's arguments."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from lightserve.text.json_schema.closing import closed_part, closed_schema
from lightserve.text.json_schema.keywords import ALTERNATIVES, BRANCHES
from lightserve.text.json_schema.schema import JsonSchema, Node, StepBudget

MAX_DEPTH = 16  # of references and branches that lead to the types of an argument
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}

Types = frozenset[str]
ANY: Types = frozenset()  # the schema does not say


class ToolSchema:
    """It is read when it is first needed: most formats of calls need no types to be parsed."""

    def __init__(self, root: Any, budget: StepBudget | None = None) -> None:
        """``budget``: that of the request; None: its own."""
        self._schema = JsonSchema(root, budget)
        self._types: dict[int, Types] = {}  # by the id of a node

    @property
    def lists_arguments(self) -> bool:
        """Whether the schema lists the arguments one by one. An empty schema allows none."""
        root = self._schema.root
        if not isinstance(root, dict) or root.keys() & {"$ref", *BRANCHES}:
            return False
        return not root or isinstance(root.get("properties"), dict)

    @cached_property
    def properties(self) -> Node:
        """The schemas of the arguments by name."""
        properties = self._schema.resolve(self._schema.root).get("properties")
        return properties if isinstance(properties, dict) else {}

    @cached_property
    def required(self) -> frozenset[str]:
        """The names of the arguments that must come."""
        names = self._schema.resolve(self._schema.root).get("required")
        return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()

    def check(self) -> None:
        """Raise InvalidRequestError if the schema is beyond a limit."""
        self._schema.check()

    @cached_property
    def closed(self) -> dict[str, Any]:
        """The schema of all arguments, for a grammar. An empty one allows none."""
        return closed_schema(self._schema) if self._schema.root else NO_ARGUMENTS

    def closed_argument(self, name: str) -> dict[str, Any]:
        """The schema of one argument, for a grammar."""
        return closed_part(self._schema, self.properties[name])

    def types(self, name: str) -> Types:
        """The JSON types that the schema allows for an argument."""
        return self._types_of(self.properties.get(name), MAX_DEPTH) if self._schema.limit_error is None else ANY

    def _types_of(self, node: Any, depth: int) -> Types:
        node = self._schema.resolve(node)
        if not depth or not node:
            return ANY
        if id(node) not in self._types:
            self._types[id(node)] = ANY  # meanwhile: a schema that refers to itself does not say more
            self._types[id(node)] = self._combined_types(node, depth)
        return self._types[id(node)]

    def _combined_types(self, node: Node, depth: int) -> Types:
        combined_types = _own_types(node)
        for keyword in ALTERNATIVES:
            combined_types = combined_types or _union(self._branch_types(node, keyword, depth))
        for types in self._branch_types(node, "allOf", depth):
            combined_types = (combined_types & types or combined_types) if types else combined_types
            combined_types = combined_types or types
        return combined_types | {"null"} if combined_types and node.get("nullable") is True else combined_types

    def _branch_types(self, node: Node, keyword: str, depth: int) -> list[Types]:
        branches = node.get(keyword)
        return [self._types_of(branch, depth - 1) for branch in branches] if isinstance(branches, list) else []


def _own_types(node: Node) -> Types:
    kind = node.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    if "const" in node:
        return _types_of_values([node["const"]])
    values = node.get("enum")
    return _types_of_values(values) if isinstance(values, list) else ANY


def _types_of_values(values: list[Any]) -> Types:
    return frozenset(_TYPES.get(type(value), "object") for value in values)


def _union(branches: list[Types]) -> Types:
    return frozenset().union(*branches) if all(branches) else ANY
