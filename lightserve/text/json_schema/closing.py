"""Closes objects: one that names its properties and says nothing of others allows no others.

This is the default of llama.cpp and xgrammar too. Without it a model invents keys, and repeats them, until its tokens
are used up.

Several schemas may describe one object: by ``allOf``, by a reference beside other keywords, by properties beside
``anyOf``. If each of them were closed, no object would fit all. So they stay open, and one more schema, which has the
names of all of them, closes the object. The result never allows a value that the client's schema refuses.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, count
from typing import Any

from lightserve.text.json_schema.keywords import (
    ALTERNATIVES,
    DEFINITIONS,
    NEGATED,
    SAME_VALUE,
    is_leaf,
    map_schemas,
    schemas_in,
)
from lightserve.text.json_schema.schema import JsonSchema, Node, work_on

_OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_DESCRIBING = frozenset(("properties", "required", "minProperties", "items", "prefixItems", *_OTHER_PROPERTIES))
# they describe values inside of the value
_INNER = frozenset(("properties", "items", "prefixItems", "additionalProperties"))
_COMPOUND = frozenset((*_INNER, *SAME_VALUE, "$ref"))  # a schema with none of these describes no object


class _Mode(enum.Enum):
    """What to do with the objects that a schema describes. The value is part of a definition's name."""

    CLOSED = ""
    OPEN = ".open"  # another schema closes the outermost object
    UNCHANGED = ".unchanged"


def closed_schema(schema: JsonSchema) -> dict[str, Any]:
    """The schema with closed objects. Its references lead to its own definitions.

    InvalidRequestError says which limit the schema is beyond.
    """
    schema.check()
    return _Closing(schema).document(schema.root)


def closed_part(schema: JsonSchema, node: Any) -> dict[str, Any]:
    """The same for a node of the schema, as a schema of its own, which has the definitions that it refers to."""
    schema.check()
    closed = _Closing(schema).document(node)
    schema.budget.spend(1, len(json.dumps(closed)))  # a large definition may be in each
    return closed


class _Closing:
    def __init__(self, schema: JsonSchema) -> None:
        self._schema = schema
        self._names: dict[tuple[int, _Mode], str] = {}  # of definitions
        self._pending: list[tuple[str, Any, _Mode]] = []  # definitions that are not written yet
        self._texts: dict[int, str] = {}  # of inner schemas, by the id of a node

    def document(self, root: Any) -> dict[str, Any]:
        written = self._write(root, _Mode.CLOSED)
        definitions: dict[str, Any] = {}
        while self._pending:
            name, node, mode = self._pending.pop()
            definitions[name] = self._write(node, mode)
        written = {**written} if isinstance(written, dict) else {}
        return {**written, "$defs": definitions} if definitions else written

    def _write(self, node: Any, mode: _Mode) -> Any:
        if not isinstance(node, dict) or is_leaf(node):
            return node
        if mode is _Mode.CLOSED:
            return self._write_closed(node)
        return self._copy(node, mode, _Mode.CLOSED if mode is _Mode.OPEN else mode)

    def _write_closed(self, node: Node) -> dict[str, Any]:
        parts = list(self._parts(node))
        if not parts:
            return _close(self._copy(node, _Mode.CLOSED, _Mode.CLOSED), [node])
        if len(parts) == 1 and _DESCRIBING.isdisjoint(node):  # each schema of this part describes the whole value
            return self._copy(node, _Mode.CLOSED, _Mode.CLOSED)
        return self._write_combined(node)

    def _write_combined(self, node: Node) -> dict[str, Any]:
        choice = self._choice(node)
        parts = [[node], *(self._schema.same_value(*schemas) for schemas in self._parts(node, choice))]
        objects = self._objects(list(chain(*parts)), node[choice] if choice else [{}])
        if any(map(self._has_conflict, objects)):
            written = self._copy(node, _Mode.UNCHANGED, _Mode.UNCHANGED)
        elif len([nodes for nodes in parts if _property_names(nodes)]) + (choice is not None) > 1:
            written = self._copy(node, _Mode.OPEN, _Mode.CLOSED)
        else:  # one schema has all names, and closes the object by itself
            return _close(self._copy(node, _Mode.CLOSED, _Mode.CLOSED), objects[0])
        if all(map(_may_close, objects)):
            written.pop("unevaluatedProperties", None)
        if choice is not None:
            pairs = zip(written[choice], objects, strict=True)
            return {**written, choice: [_add_closing(branch, node, nodes) for branch, nodes in pairs]}
        return {**_add_closing(written, node, objects[0])}

    def _choice(self, node: Node) -> str | None:
        """The keyword of the only alternatives that name properties; None if there are none, or several."""
        lists = [keyword for keyword in ALTERNATIVES if isinstance(node.get(keyword), list)]
        named = [keyword for keyword in lists if _property_names(self._schema.same_value(*node[keyword]))]
        return named[0] if len(named) == 1 else None

    def _parts(self, node: Node, choice: str | None = None) -> Iterator[Iterable[Any]]:
        """The other schemas that describe the same value, without those of ``choice``; alternatives are one part."""
        for keyword, value in node.items():
            if keyword == "$ref":
                yield [self._schema.target(node)]
            elif keyword == "allOf":
                yield from ([schema] for schema in schemas_in(keyword, value))
            elif keyword in SAME_VALUE and keyword != choice:
                yield schemas_in(keyword, value)

    def _objects(self, common: list[Node], branches: list[Any]) -> list[list[Node]]:
        """For each branch, the schemas that describe the object together."""
        self._schema.budget.spend(len(branches) * sum(work_on(node, _INNER | {"required"}) for node in common))
        return [[*common, *self._schema.same_value(branch)] for branch in branches]

    def _has_conflict(self, nodes: list[Node]) -> bool:
        """Whether two of the schemas describe objects inside of the same inner value. Closing both would leave none."""
        texts: dict[tuple[str, str | int], str] = {}
        inner_texts = ((key, self._text(inner)) for node in nodes for key, inner in _inner_values(node))
        return any(texts.setdefault(key, text) != text for key, text in inner_texts)

    def _text(self, node: Node) -> str:
        """The same for equal nodes. Comparing the nodes themselves would take longer, each time."""
        if id(node) not in self._texts:
            text = self._texts[id(node)] = json.dumps(node, sort_keys=True)
            self._schema.budget.spend(1, len(text))
        return self._texts[id(node)]

    def _copy(self, node: Node, parts: _Mode, inner: _Mode) -> dict[str, Any]:
        """The node. Schemas of the same value are written as ``parts``, those of values inside of it as ``inner``."""
        self._schema.budget.spend(1)
        written: dict[str, Any] = {}
        for keyword, value in node.items():
            if keyword == "$ref":
                written[keyword] = self._reference(node, parts)
            elif keyword not in DEFINITIONS:
                mode = _Mode.UNCHANGED if keyword in NEGATED else parts if keyword in SAME_VALUE else inner
                written[keyword] = map_schemas(keyword, value, partial(self._write, mode=mode))
        return written

    def _reference(self, node: Node, mode: _Mode) -> Any:
        reference, target = node["$ref"], self._schema.target(node)
        if target is None:
            return reference  # llguidance says what is wrong with it
        key = (id(target), mode)
        if key not in self._names:
            word = re.sub(r"\W", "_", reference.rpartition("/")[2])[:64]
            self._names[key] = f"{word}.{len(self._names)}{mode.value}"
            self._pending.append((self._names[key], target, mode))
        return f"#/$defs/{self._names[key]}"


def _close(written: dict[str, Any], nodes: list[Node]) -> dict[str, Any]:
    """The only schema of ``nodes`` that names properties, closed if it is this one, and not one that it refers to."""
    if not _may_close(nodes):
        return written
    written.pop("unevaluatedProperties", None)  # closing says the same, and llguidance does not know it
    properties = written.get("properties")
    if not isinstance(properties, dict):
        return written
    return {
        **written,
        "properties": dict.fromkeys(_property_names(nodes), True) | properties,
        "additionalProperties": False,
    }


def _add_closing(written: Any, node: Node, nodes: list[Node]) -> Any:
    """``written`` and a schema that has only the names of ``nodes``, which describe the object together."""
    others = written.get("allOf", []) if isinstance(written, dict) else None
    if not isinstance(others, list) or not _may_close(nodes):
        return written
    kind = {"type": node["type"]} if "type" in node else {}
    closing = {**kind, "properties": dict.fromkeys(_property_names(nodes), True), "additionalProperties": False}
    return {**written, "allOf": [*others, closing]}


def _property_names(nodes: Iterable[Node]) -> list[str]:
    """The properties that the schemas name. Required ones must be possible, even if nothing else is said of them."""
    properties = [name for node in nodes for name in _properties(node)]
    required = [name for node in nodes for name in _required(node)]
    return list(dict.fromkeys(properties + required))


def _may_close(nodes: Iterable[Node]) -> bool:
    """Whether the schemas name properties, and say nothing of others."""
    if not any(isinstance(node.get("properties"), dict) for node in nodes) or any(map(_has_others, nodes)):
        return False
    least = [node["minProperties"] for node in nodes if isinstance(node.get("minProperties"), int)]
    return max(least, default=0) <= len(_property_names(nodes))


def _has_others(node: Node) -> bool:
    return any(node.get(keyword, False) is not False for keyword in _OTHER_PROPERTIES)


def _inner_values(node: Node) -> Iterator[tuple[tuple[str, str | int], Node]]:
    """The schemas of values inside of the value that may describe objects, and their place."""
    for keyword in node.keys() & _INNER:
        names: Iterable[str | int] = _properties(node) if keyword == "properties" else count()
        for name, inner in zip(names, schemas_in(keyword, node[keyword]), strict=False):
            if isinstance(inner, dict) and not _COMPOUND.isdisjoint(inner):
                yield (keyword, name), inner


def _properties(node: Node) -> Node:
    properties = node.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(node: Node) -> list[str]:
    names = node.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
