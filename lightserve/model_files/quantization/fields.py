"""Reads fields of ``quantization_config``. A value that is not supported is named, with what is."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from lightserve.errors import ModelFilesError

REMEDY = "use the unquantised checkpoint with --quantization w4 or int8"
HEADS = ("lm_head", "output", "embed_out", "output_layer")
ROUTERS = ("gate", "router", "shared_expert_gate")


def refused(key: str, value: object, supported: str) -> ModelFilesError:
    return ModelFilesError(
        f"config.json: quantization_config has {key} {reprlib.repr(value)}, which is not supported "
        f"(supported: {supported}); {REMEDY}"
    )


def choice(table: Mapping[str, Any], key: str, supported: Collection[Any], default: Any = None) -> Any:
    """One of a few values. Text may have any case."""
    value = table.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if value not in supported or isinstance(value, bool) != isinstance(next(iter(supported)), bool):
        raise refused(key, value, ", ".join(map(str, supported)))
    return value


def flag(table: Mapping[str, Any], key: str, default: bool) -> bool:
    value = table.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(key, value, "true, false")
    return value


def group_size(table: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> int | None:
    """None: one group per output row, which files call -1."""
    value = table.get(key, default)
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refused(key, value, "-1 and positive integers")
    return value


def names(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of modules."""
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused(key, value, "a list of names")
    return tuple(value)


def subtable(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key) or {}
    if not isinstance(value, dict):
        raise refused(key, value, "an object")
    return value


def pattern(key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise refused(key, text, f"regular expressions: {error}") from error


def is_in_block(module: str) -> bool:
    """Whether a module is part of a numbered layer: most formats quantise only these."""
    return any(part.isdigit() for part in module.split("."))


def last_name(module: str) -> str:
    return module.rpartition(".")[2]


def contains(module: str, parts: Collection[str]) -> bool:
    """Whether one of ``parts`` is a run of whole names in ``module``: "layers.1" is in "model.layers.1.mlp"."""
    return any(f".{part}." in f".{module}." for part in parts)
