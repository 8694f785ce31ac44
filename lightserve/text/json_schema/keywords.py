"""Where schemas are in a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

ALTERNATIVES = ("anyOf", "oneOf")
BRANCHES = ("allOf", *ALTERNATIVES)
SAME_VALUE = frozenset((*BRANCHES, "then", "else", "dependentSchemas"))  # they describe the value that the schema does
NEGATED = frozenset(("not", "if"))  # they do too, but a value need not fit them
_LISTS = frozenset((*BRANCHES, "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "dependentSchemas"))
_OF_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains")
_OF_PROPERTIES = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_SINGLE = frozenset(("then", "else", *_OF_ITEMS, *_OF_PROPERTIES)) | NEGATED

ALL_KEYWORDS = _LISTS | _MAPS | _SINGLE
DEFINITIONS = ("$defs", "definitions")
_LEADING = ALL_KEYWORDS | {"$ref", *DEFINITIONS}


def is_leaf(node: dict[str, Any]) -> bool:
    """Whether the schema has no schemas in it and refers to none. Most schemas are leaves."""
    return _LEADING.isdisjoint(node)


def schemas_in(keyword: str, value: Any) -> Iterable[Any]:
    """The schemas in the value of a keyword."""
    if isinstance(value, list):
        return value if keyword in _LISTS else ()
    if isinstance(value, dict) and keyword in _MAPS:
        return value.values()
    return (value,) if keyword in _SINGLE else ()


def map_schemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword with each of its schemas changed."""
    if isinstance(value, list):
        return [change(schema) for schema in value] if keyword in _LISTS else value
    if isinstance(value, dict) and keyword in _MAPS:
        return {name: change(schema) for name, schema in value.items()}
    return change(value) if keyword in _SINGLE else value
