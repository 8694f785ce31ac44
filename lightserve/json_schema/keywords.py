"""Where schemas are in a schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ALTERNATIVES = ("anyOf", "oneOf")
BRANCHES = ("allOf", *ALTERNATIVES)
_LISTS = frozenset((*BRANCHES, "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "dependentSchemas"))
_OF_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains")
_OF_PROPERTIES = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_SINGLE = frozenset(("not", "if", "then", "else", *_OF_ITEMS, *_OF_PROPERTIES))


def schemas_in(keyword: str, value: Any) -> Iterable[Any]:
    """The schemas in the value of a keyword."""
    if isinstance(value, list):
        return value if keyword in _LISTS else ()
    if isinstance(value, Mapping) and keyword in _MAPS:
        return value.values()
    return (value,) if keyword in _SINGLE else ()
