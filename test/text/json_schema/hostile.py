"""Schemas that are small and expensive."""

from __future__ import annotations

from typing import Any

STRING = {"type": "string"}


def chain(count: int, link: Any) -> dict[str, Any]:
    """So many definitions, each of which refers to the next one in ``link``, a function of the reference."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": STRING}}


def chain_of_branches(count: int) -> dict[str, Any]:
    return chain(count, lambda reference: {"allOf": [reference]})


def chain_of_objects(count: int) -> dict[str, Any]:
    return chain(count, lambda reference: {"type": "object", "properties": {"a": reference}})


def chain_of_references(count: int) -> dict[str, Any]:
    return chain(count, lambda reference: reference)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def every_object_in_every_other(count: int) -> dict[str, Any]:
    references = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"properties": references} for i in range(count)}}


def every_object_of_every_other(count: int, keyword: str) -> dict[str, Any]:
    """Each of them is combined with all by ``keyword``."""
    references = [{"$ref": f"#/$defs/d{i}"} for i in range(count)]
    definitions = {f"d{i}": {"properties": {f"p{i}": STRING}, keyword: references} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def names_beside_branches(names: int, branches: int, length: int = 8) -> dict[str, Any]:
    """Closing each branch takes all names."""
    properties = {f"{i}".rjust(length, "p"): STRING for i in range(names)}
    return {"properties": properties, "anyOf": [{"properties": {f"q{i}": STRING}} for i in range(branches)]}


def equal_objects_in_branches(size: int, branches: int) -> dict[str, Any]:
    """In each branch, two definitions of the same property, which may be equal."""
    definitions = {
        name: {"properties": {"x": {"properties": {f"a{i}": {"items": STRING} for i in range(size)}}}} for name in "bc"
    }
    both = {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}
    return {"properties": {"z": STRING}, "anyOf": [dict(both) for _ in range(branches)], "$defs": definitions}


def list_in_every_argument(size: int, arguments: int) -> dict[str, Any]:
    """Each argument's schema, which is a document by itself, has the list."""
    properties = {f"p{i}": {"$ref": "#/$defs/list"} for i in range(arguments)}
    return {"type": "object", "properties": properties, "$defs": {"list": {"enum": list(range(size))}}}
