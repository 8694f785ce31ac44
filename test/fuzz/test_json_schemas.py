"""JSON schemas with references, branches, depth and size: reading them takes bounded work, a grammar that kills its
compiler kills nothing else, and closing objects forbids no value that the schema describes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations, product
from typing import Any

import jsonschema_rs
import psutil
import pytest
from hypothesis import given, strategies as st

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.grammar.check import GrammarCheck
from lightserve.messages.params import MAX_GRAMMAR_LENGTH, GrammarSpec
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.process import MAX_PEAK_MIB
from lightserve.text.grammar.specs import schema_grammar
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from lightserve.text.json_schema.closing import closed_schema
from lightserve.text.json_schema.schema import CHARACTERS_PER_STEP, MAX_STEPS, JsonSchema
from lightserve.text.json_schema.tool_schema import ToolSchema
from test.fuzz.profile import FUZZ
from test.small_text import small_tokenizer
from test.text.json_schema.hostile import (
    chain,
    equal_objects_in_branches,
    every_object_in_every_other,
    every_object_of_every_other,
    names_beside_branches,
    nested,
)
from test.waiting import has_ended

TOKENIZER = small_tokenizer()
COMPILER = GrammarCompiler(GrammarVocabulary.of(TOKENIZER))
DEFINITIONS = 6

names = st.sampled_from(["a", "b", "c", "x", "$ref", "a/b"])
references = st.integers(0, DEFINITIONS).map(lambda i: {"$ref": "#" if i == DEFINITIONS else f"#/$defs/d{i}"})
ODD: tuple[Any, ...] = (
    {},
    True,
    False,
    None,
    7,
    "x",
    {"type": "nothing"},
    {"minLength": -1},
    {"type": "array", "maxItems": 10**6},
)
PLAIN = ({"type": "string"}, {"type": ["integer", "null"]}, {"const": 1}, {"enum": ["a", 1]}, {"pattern": "^a*a{9}$"})
leaves = st.sampled_from([*ODD, *PLAIN])


def combine(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A schema with keywords whose values have these schemas, or anything else."""
    several = st.lists(schemas, max_size=4)
    named = st.dictionaries(names, schemas, max_size=4)
    keywords = {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), named),
        **dict.fromkeys(("items", "additionalProperties", "not", "if", "then"), schemas),
        "required": st.lists(names, max_size=3),
        "minProperties": st.integers(0, 3),
        "unevaluatedProperties": st.booleans(),
        "$ref": references.map(lambda one: one["$ref"]),
    }
    return st.fixed_dictionaries({}, optional=keywords)


schemas = st.recursive(references | leaves, combine, max_leaves=12)
wide = st.builds(
    lambda count, keyword, one: {keyword: [one] * count},
    st.sampled_from([10, 1024, 1025, 3000]),
    st.sampled_from(["anyOf", "allOf", "oneOf", "enum", "prefixItems"]),
    references | st.just({"type": "string"}),
)
deep = st.builds(
    lambda count, keyword: chain(count, lambda one: {keyword: {"a": one} if keyword == "properties" else [one]}),
    st.sampled_from([10, 300, 600, 3000]),
    st.sampled_from(["allOf", "anyOf", "properties", "prefixItems"]),
)
large = st.sampled_from([every_object_in_every_other(30), nested(64), nested(65), {"enum": list(range(60_000))}])
combined = st.one_of(
    st.builds(every_object_of_every_other, st.sampled_from([5, 20, 60]), st.sampled_from(["allOf", "anyOf", "oneOf"])),
    st.builds(names_beside_branches, st.integers(1, 50), st.sampled_from([2, 100, 1024]), st.sampled_from([4, 2000])),
    st.builds(equal_objects_in_branches, st.sampled_from([1, 500]), st.sampled_from([1, 500])),
)
documents = st.builds(
    lambda root, definitions: {**(root if isinstance(root, dict) else {}), "$defs": definitions},
    schemas | wide,
    st.fixed_dictionaries({f"d{i}": schemas | wide for i in range(DEFINITIONS)}),
)
hostile = documents | deep | large | combined


@FUZZ
@given(schema=hostile)
def test_reading_a_schema_takes_bounded_work_and_raises_nothing_else(schema: dict[str, Any]) -> None:
    read = JsonSchema(schema)
    closed = {}
    with suppress(InvalidRequestError):
        closed = closed_schema(read)

    assert len(json.dumps(closed)) <= 4 * len(json.dumps(schema)) + CHARACTERS_PER_STEP * MAX_STEPS
    assert read.budget.used <= MAX_STEPS + 1
    tool = ToolSchema(schema)
    assert all(isinstance(tool.types(name), frozenset) for name in [*tool.properties][:50])


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck()
    check.prepare(TOKENIZER)
    asyncio.run(check.check(TOKENIZER, GrammarSpec("regex", "a")))  # its process begins with the first grammar
    yield check
    check.close()


def started_by(check: GrammarCheck) -> psutil.Process:
    assert check._process is not None
    started = check._process._process
    assert started is not None
    return psutil.Process(started.pid)


def resident_bytes(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):  # it replaces itself after a large grammar
        return int(process.memory_info().rss)
    return 0


@FUZZ
@given(schema=hostile)
def test_no_schema_ends_anything_but_its_own_compilation(check: GrammarCheck, schema: dict[str, Any]) -> None:
    parent = started_by(check)

    with suppress(InvalidRequestError):
        spec = schema_grammar(schema, is_strict=False)
        if len(spec.text) < MAX_GRAMMAR_LENGTH:
            asyncio.run(check.check(TOKENIZER, spec))

    assert not has_ended(parent)
    assert asyncio.run(check.check(TOKENIZER, GrammarSpec("regex", "a+"))).kind == "regex"
    assert all(one <= resident_bytes(parent) + MAX_PEAK_MIB * 2**20 for one in map(resident_bytes, parent.children()))


# Values, and schemas that describe them in a random way
values = st.recursive(
    st.sampled_from([0, 12, True, "a", "xy"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)


class Describe:
    """Draws a schema of a value."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self.definitions: dict[str, Any] = {}

    def schema(self, value: Any) -> dict[str, Any]:
        schema = self._plain(value)
        wrap = self._draw(st.sampled_from(["", "", "$ref", "allOf", "anyOf", "both"]))
        if wrap == "$ref":
            name = f"d{len(self.definitions)}"
            self.definitions[name] = schema
            return {"$ref": f"#/$defs/{name}"}
        if wrap == "both":
            return {"allOf": [schema, self._plain(value)]}
        other = {"type": "object", "properties": {"z": {"const": 1}}, "required": ["z"]}
        return {"allOf": [schema]} if wrap == "allOf" else {"anyOf": [other, schema]} if wrap == "anyOf" else schema

    def _plain(self, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list):
            prefix = {"prefixItems": [self.schema(one) for one in value]} if value else {}
            return {"type": "array", **prefix, "items": False}
        return self._draw(st.sampled_from([{"const": value}, {"enum": [value, "b"]}]))

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        """Some properties in the schema itself, some in allOf, some in both."""
        own = {name for name in value if self._draw(st.booleans())}
        more = {name for name in value if name not in own or self._draw(st.integers(0, 3)) == 0}
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.schema(value[name]) for name in own}}
        if more:
            schema["allOf"] = [{"properties": {name: self.schema(value[name])}} for name in sorted(more)]
        schema["required"] = [name for name in value if self._draw(st.booleans())]
        return schema


@st.composite
def described(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    value, describe = draw(values), Describe(draw)
    schema = describe.schema(value)
    return value, {**schema, "$defs": describe.definitions}


def orders(value: Any) -> Iterator[Any]:
    """The value with the properties of its objects in every order."""
    if isinstance(value, list):
        yield from map(list, product(*map(list, map(orders, value))))
    elif isinstance(value, dict):
        for names in permutations(value):
            yield from (dict(zip(names, inner, strict=True)) for inner in product(*(orders(value[n]) for n in names)))
    else:
        yield value


def is_allowed(schema: dict[str, Any], value: Any) -> bool:
    matcher = COMPILER.compile(schema_grammar(schema, is_strict=False))
    return matcher.consume_tokens(TOKENIZER.encode(json.dumps(value))) and matcher.is_accepting()


@FUZZ
@given(case=described())
def test_a_closed_schema_allows_the_values_that_it_describes(case: tuple[Any, dict[str, Any]]) -> None:
    value, schema = case
    jsonschema_rs.validate(schema, value)

    assert any(is_allowed(schema, one) for one in orders(value)), (schema, value)
    if isinstance(value, dict):
        assert not any(is_allowed(schema, one | {"q": 1}) for one in orders(value)), (schema, value)
