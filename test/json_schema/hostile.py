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
