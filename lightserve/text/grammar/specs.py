"""Grammars that are made of a JSON value. compiler.py says what the text of each kind is."""

from __future__ import annotations

import json
from typing import Any

from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar.structural_format import with_closed_schemas
from lightserve.text.json_schema.closing import closed_schema
from lightserve.text.json_schema.schema import JsonSchema, StepBudget


def schema_grammar(schema: dict[str, Any], is_strict: bool = True) -> GrammarSpec:
    """Any JSON that the schema allows, with closed objects.

    If not strict, keywords that cannot be enforced are ignored, else rejected.
    """
    closed = closed_schema(JsonSchema(schema))
    if not is_strict:
        options = schema.get("x-guidance")
        closed["x-guidance"] = (options if isinstance(options, dict) else {}) | {"lenient": True}
    return _spec("json_schema", closed)


def choice_grammar(choices: list[str]) -> GrammarSpec:
    """One of these texts."""
    return _spec("choice", choices)


def structural_tag_grammar(tag: dict[str, Any]) -> GrammarSpec:
    """``tag`` may be malformed: the compiler says how."""
    if tag.get("format") is not None:
        return _spec("structural_tag", {"format": with_closed_schemas(tag["format"], StepBudget())})
    structures = tag.get("structures")
    if isinstance(structures, list):
        budget = StepBudget()
        tag = tag | {"structures": [_closed_structure(structure, budget) for structure in structures]}
    return _spec("structural_tag", tag)


def _closed_structure(structure: Any, budget: StepBudget) -> Any:
    schema = structure.get("schema") if isinstance(structure, dict) else None
    return structure | {"schema": closed_schema(JsonSchema(schema, budget))} if isinstance(schema, dict) else structure


def _spec(kind: Any, value: Any) -> GrammarSpec:
    return GrammarSpec(kind, json.dumps(value, ensure_ascii=False))
