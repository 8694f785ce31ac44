"""The fields of a body that constrain the output text, under the names of OpenAI, vLLM, SGLang, LightLLM and TGI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import orjson
from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body
from lightserve.messages.params import MAX_GRAMMAR_LENGTH, GrammarSpec
from lightserve.text.grammar.specs import choice_grammar, schema_grammar, structural_tag_grammar

MAX_CHOICES = 4096
MAX_STRUCTURES = 128  # of a structural tag

Schema = dict[str, Any] | str  # or its JSON
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
GrammarFactory = Callable[[], GrammarSpec]


class HasGrammars(Protocol):
    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        """The fields that are set, each with a function that makes its grammar."""


async def requested_grammar(context: ServerContext, fields: HasGrammars) -> GrammarSpec | None:
    """The grammar of a body, after it was compiled once; an error names the field."""
    given = list(fields.grammars())
    if not given:
        return None
    name, make = given[0]
    if len(given) > 1:
        raise InvalidRequestError(f"{given[1][0]}: does not combine with {name}", given[1][0])
    try:
        spec = make()
        length = max(len(spec.text), len(spec.before))
        if length > MAX_GRAMMAR_LENGTH:
            raise InvalidRequestError(f"the grammar has {length} characters; the limit is {MAX_GRAMMAR_LENGTH}")
        return await context.grammars.check(context.tokenizer, spec)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}", name) from error


class NamedSchema(Body):
    """OpenAI's. Keywords that cannot be enforced are ignored unless ``strict`` is set."""

    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema", description="with json_object, as llama.cpp")
    structures: Annotated[list[dict[str, Any]], Field(max_length=MAX_STRUCTURES, fail_fast=True)] | None = Field(
        default=None, description="of a structural_tag, as vLLM"
    )
    triggers: Annotated[list[str], Field(max_length=MAX_STRUCTURES, fail_fast=True)] | None = None
    format: dict[str, Any] | None = Field(default=None, description="of a structural_tag, as xgrammar")
    value: Schema | None = Field(default=None, description="of json, json_object, json_schema and regex, as TGI")

    def grammar(self) -> GrammarSpec:
        if self.type in ("json", "regex") and self.value is None:
            raise InvalidRequestError(f"the type {self.type} needs value")
        if self.value is not None and self.type != "structural_tag":
            return tgi_grammar(self.type, self.value, is_strict=False)
        if self.type == "structural_tag":
            tag = {"structures": self.structures, "triggers": self.triggers, "format": self.format}
            return structural_tag_grammar({name: value for name, value in tag.items() if value is not None})
        if self.type == "json_object":
            return GrammarSpec("json_object") if self.schema_ is None else _of_schema(self.schema_)
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequestError("the type json_schema needs json_schema.schema")
        return _of_schema(self.json_schema.schema_, is_strict=bool(self.json_schema.strict))


class StructuredOutputs(Body):
    """vLLM's: one of these fields."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(default=None, description="in GBNF or Lark")
    json_object: bool | None = None
    structural_tag: Schema | None = None

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        if self.json_ is not None:
            yield "structured_outputs.json", partial(_of_schema, self.json_)
        if self.regex is not None:
            yield "structured_outputs.regex", partial(GrammarSpec, "regex", self.regex)
        if self.choice is not None:
            yield "structured_outputs.choice", partial(choice_grammar, self.choice)
        if self.grammar is not None:
            yield "structured_outputs.grammar", partial(GrammarSpec, "ebnf", self.grammar)
        if self.json_object:
            yield "structured_outputs.json_object", partial(GrammarSpec, "json_object")
        if self.structural_tag is not None:
            yield "structured_outputs.structural_tag", partial(_of_tag, self.structural_tag)


class GuidedFields(Body):
    """The fields that LightLLM's bodies have too. An empty text means no grammar."""

    guided_json: Schema | None = Field(default=None, description="a JSON schema")
    guided_grammar: str | None = Field(default=None, description="in GBNF or Lark")
    regular_constraint: str | None = Field(default=None, description="a regular expression")

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        if self.guided_json is not None and self.guided_json != "":
            yield "guided_json", partial(_of_schema, self.guided_json)
        if self.guided_grammar:
            yield "guided_grammar", partial(GrammarSpec, "ebnf", self.guided_grammar)
        if self.regular_constraint:
            yield "regular_constraint", partial(GrammarSpec, "regex", self.regular_constraint)


class GrammarFields(GuidedFields):
    """The fields of OpenAI's bodies: OpenAI's own, vLLM's new and old ones, SGLang's, llama.cpp's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        yield from super().grammars()
        if self.response_format is not None and self.response_format.type != "text":
            yield "response_format", self.response_format.grammar
        if self.structured_outputs is not None:
            yield from self.structured_outputs.grammars()
        if self.guided_choice is not None:
            yield "guided_choice", partial(choice_grammar, self.guided_choice)
        if self.json_schema is not None:
            yield "json_schema", partial(_of_schema, self.json_schema)
        for name in ("guided_regex", "regex"):
            if getattr(self, name) is not None:
                yield name, partial(GrammarSpec, "regex", getattr(self, name))
        for name in ("ebnf", "grammar"):
            if getattr(self, name):
                yield name, partial(GrammarSpec, "ebnf", getattr(self, name))


class TgiGrammar(Body):
    """TGI's: ``value`` is a JSON schema, a regular expression, or {"name", "schema"}."""

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Schema

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        yield "grammar", partial(tgi_grammar, self.type, self.value)


def tgi_grammar(kind: str, value: Schema, is_strict: bool = True) -> GrammarSpec:
    """TGI's ``type`` and ``value``."""
    if kind == "regex":
        if not isinstance(value, str):
            raise InvalidRequestError("the value of a regex must be a string")
        return GrammarSpec("regex", value)
    if kind == "json_schema":
        named = _object(value)
        return _of_schema(named.get("schema", named), is_strict)
    return _of_schema(value, is_strict)


def _of_schema(schema: Schema, is_strict: bool = True) -> GrammarSpec:
    return schema_grammar(_object(schema), is_strict)


def _of_tag(tag: Schema) -> GrammarSpec:
    return structural_tag_grammar(_object(tag))


def _object(value: Any) -> dict[str, Any]:
    """A JSON object, given as an object or as its text."""
    try:
        parsed = orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"this is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError("it must be a JSON object")
    return parsed
