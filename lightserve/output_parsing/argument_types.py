"""The JSON types that a tool's schema allows for an argument, for formats that write every value as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 16  # of references and unions
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}

Types = frozenset[str]
ANY: Types = frozenset()  # the schema does not say


def argument_types(schema: Any, name: str) -> Types:
    """The types that the schema of a tool allows for one argument. The client wrote it: any part may be malformed."""
    properties = _resolved(schema, schema).get("properties")
    return _TypeSearch(schema).types(properties.get(name), MAX_DEPTH) if isinstance(properties, Mapping) else ANY


class _TypeSearch:
    """It visits a node once, however many references and branches lead to it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types: dict[int, Types] = {}  # by the id of a node

    def types(self, node: Any, depth: int) -> Types:
        node = _resolved(node, self._root)
        if not depth or not node:
            return ANY
        if id(node) not in self._types:
            self._types[id(node)] = ANY  # for the branches that lead back to it
            self._types[id(node)] = self._combined(node, depth)
        return self._types[id(node)]

    def _combined(self, node: Mapping[str, Any], depth: int) -> Types:
        found = _own_types(node)
        for keyword in ("anyOf", "oneOf"):
            found = found or _union(self._branches(node, keyword, depth))
        for types in self._branches(node, "allOf", depth):
            found = (found & types or found) if types else found
            found = found or types
        return found | {"null"} if found and node.get("nullable") is True else found

    def _branches(self, node: Mapping[str, Any], keyword: str, depth: int) -> list[Types]:
        branches = node.get(keyword)
        return [self.types(one, depth - 1) for one in branches] if isinstance(branches, list) else []


def _own_types(node: Mapping[str, Any]) -> Types:
    kind = node.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    if "const" in node:
        return _types_of_values([node["const"]])
    values = node.get("enum")
    return _types_of_values(values) if isinstance(values, list) else ANY


def _types_of_values(values: list[Any]) -> Types:
    return frozenset(_TYPES.get(type(value), "object") for value in values)


def _union(branches: list[Types]) -> Types:
    return frozenset().union(*branches) if all(branches) else ANY


def _resolved(node: Any, root: Any) -> Mapping[str, Any]:
    """The schema that a chain of references leads to; empty if there is none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(node, Mapping):
            return {}
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return node
        node = _target(reference, root)
    return {}


def _target(reference: str, root: Any) -> Any:
    """What a reference like ``#/$defs/City`` refers to; None if it leads nowhere or to another document."""
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
