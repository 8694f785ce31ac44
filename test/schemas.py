"""JSON schemas by the hundred, each from its seed: nested, with enums, patterns, bounds, lists, oneOf, references."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[A-Z][a-z]{1,8}$", "^[0-9]{3}-[0-9]{4}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$", "^[a-z]+@[a-z]+\\.com$")
NAMES = ("name", "age", "city", "tags", "price", "id", "kind", "status", "items", "owner")


def schema_of(seed: int) -> dict[str, Any]:
    """An object, whose answers are short enough for a small model."""
    rng = random.Random(seed)
    schema = _object(rng, depth=2)
    if rng.random() < 0.4:
        schema["$defs"] = {"shared": _object(rng, depth=0)}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        schema["required"].append("shared")
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_text, _pattern, _integer, _number, _enum, _constant)
    branches = (_list, _one_of, _object)
    if depth and rng.random() < len(branches) / (len(leaves) + len(branches)):
        return rng.choice(branches)(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _text(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(1, 12)}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _integer(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 500)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice((1, 9.5, 250))}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["low", "high", 1, 2.5, None, True, 'with "quotes"', "ünï"], rng.randint(1, 4))}


def _constant(rng: random.Random) -> dict[str, Any]:
    return rng.choice(({"const": "fixed"}, {"type": "boolean"}, {"type": "null"}))


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"oneOf": [_text(rng), _integer(rng), _object(rng, depth)]}
