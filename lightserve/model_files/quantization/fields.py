"""Reads the fields of a ``quantization_config``. What is not supported is refused by its name."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from lightserve.errors import ModelFilesError

T = TypeVar("T")
UNQUANTIZED = "use the unquantised checkpoint with --quantization"


def refused(field: str, value: object, supported: object, remedy: str = UNQUANTIZED) -> ModelFilesError:
    text = value[:100] if isinstance(value, str) else reprlib.repr(value)
    return ModelFilesError(f"quantization_config: {field} {text} is not supported; supported: {supported}; {remedy}")


def check_value(table: Mapping[str, Any], field: str, *supported: object) -> None:
    """Refuse other values. A field that is not there passes."""
    value = table.get(field)
    if value is not None and not any(type(value) is type(good) and value == good for good in supported):
        raise refused(field, value, ", ".join(map(str, supported)))


def choice(table: Mapping[str, Any], field: str, choices: Mapping[str, T], default: str | None = None) -> T:
    value = table.get(field, default)
    if not isinstance(value, str) or value not in choices:
        raise refused(field, value, ", ".join(choices))
    return choices[value]


def names(table: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """The entries of all lists of names in ``fields``."""
    entries: list[str] = []
    for field in fields:
        value = table.get(field) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise refused(field, value, "a list of module names", "correct it")
        entries += value
    return tuple(entries)


def subtable(table: Mapping[str, Any], field: str) -> dict[str, Any]:
    """An object in a field; empty if it is absent or null."""
    value = table.get(field) or {}
    if not isinstance(value, dict):
        raise refused(field, value, "an object", "correct it")
    return value


def flag(table: Mapping[str, Any], field: str, default: bool) -> bool:
    check_value(table, field, True, False)
    return table.get(field, default) is True


def number_of(table: Mapping[str, Any], field: str, *supported: int) -> int:
    """One of a few integers; it must be there."""
    value = table.get(field)
    if type(value) is not int or value not in supported:
        raise refused(field, value, ", ".join(map(str, supported)))
    return value


def group_size_of(table: Mapping[str, Any]) -> int | None:
    """None: one group per output row, which files call -1."""
    value = table.get("group_size", 128)
    if value is None or value == -1:
        return None
    if type(value) is not int or value < 1:
        raise refused("group_size", value, "-1 and positive integers", "correct it")
    return value
