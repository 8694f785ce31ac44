"""The output of a chat: parsed into reasoning, content and tool calls, constrained by its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import msgspec
from pydantic_core import from_json

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.chat.choice_parser import ChoiceParser, CustomToolParser
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.chat.tools import Tool
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.grammar import GrammarFactory, requested_grammar
from lightserve.messages.params import GrammarSpec, ThinkingLimit
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.grammar.specs import schema_grammar
from lightserve.text.json_schema.schema import StepBudget
from lightserve.text.json_schema.tool_schema import ToolSchema
from lightserve.text.parsing import OutputParser
from lightserve.text.parsing.delta_writer import DeltaWriter, Tools, call_id
from lightserve.text.parsing.parser import parse_content
from lightserve.text.parsing.reasoning import ReasoningFormat, ReasoningParser, reasoning_format
from lightserve.text.parsing.tool_calls.base import ToolFormat
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME, tool_format
from lightserve.text.parsing.tool_grammar import (
    ANY_OBJECT,
    Calls,
    Thinking,
    call_or_answer_grammar,
    call_or_text_grammar,
    can_constrain,
    enforceable_format,
    forced_grammar,
)

TOOL_GRAMMARS = FORCED, STRICT = "tool_choice", "tools"  # the fields that ask for a grammar of calls


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How the model writes tool calls and reasoning; None: it does not."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


def output_formats(context: ServerContext) -> OutputFormats:
    """Taken from the flags, or from the chat template."""
    tokenizer = context.optional_tokenizer
    template = "" if tokenizer is None else tokenizer.chat_template_text
    return _formats(context.config.tool_call_parser, context.config.reasoning_parser, template)


@lru_cache(maxsize=4)
def _formats(tools: str, reasoning: str, template: str) -> OutputFormats:
    return OutputFormats(tool_format(tools, template), reasoning_format(reasoning, template))


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the outputs of one chat are parsed."""

    body: ChatBody
    tool_format: ToolFormat | None  # None: no tool calls
    thinking: Thinking | None  # None: reasoning is part of the content
    marker_ids: dict[str, int]  # marker: id, where a marker of either format is one added token
    special_ids: tuple[int, ...]  # those of them that are special tokens, which the text would lack
    schemas: Tools  # of the offered tools
    limit: ThinkingLimit | None = None  # of its reasoning tokens

    @property
    def is_plain(self) -> bool:
        """The whole output is content."""
        return self.tool_format is None and self.thinking is None

    def apply(self, prompt_request: PromptRequest) -> PromptRequest:
        """The same request, where the text keeps the markers for the parsers and the engine limits reasoning."""
        params = prompt_request.params.replace(
            shown_special_ids=self.special_ids,
            thinking=self.limit,
            continues_text=bool(self.body.continue_final_message),
        )
        return replace(prompt_request, params=params)

    def new_parser(self) -> ChoiceParser:
        tools = self.tool_format
        parse = parse_content if tools is None else tools.parse
        new_id = call_id if tools is None else tools.new_id
        if self.thinking is not None and self.thinking.reasoning_format.parse_output is not None:
            parse = self.thinking.reasoning_format.parse_output
        elif self.thinking is not None:
            call_begins = () if tools is None else tools.call_begins
            parse = ReasoningParser(self.thinking.reasoning_format, self.thinking.is_begun, parse, call_begins).parse
        separates, only_calls = self.body.separate_reasoning is not False, bool(self.body.forced_tools)
        writer = DeltaWriter(self.schemas, new_id, self.body.max_tool_calls, separates, only_calls)
        parser = OutputParser(parse, writer)
        shows_reasoning = self.body.include_reasoning is not False
        custom = frozenset(tool.definition.name for tool in self.body.offered_tools if tool.is_custom)
        return CustomToolParser(parser, shows_reasoning, custom) if custom else ChoiceParser(parser, shows_reasoning)

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        """The grammar of the output, and the field that asks for it. requested_grammar refuses two.

        A call that is forced is the whole output: then a grammar of the answer has no effect. Otherwise the model calls
        tools or answers by its grammar.
        """
        body_grammars = list(self.body.grammars())
        if self.tool_format is not None and self.body.forced_tools:
            yield FORCED, partial(self._forced, self.tool_format, body_grammars)
            return
        for name, make in body_grammars:
            yield name, partial(self._call_or_answer, make)
        if (
            not body_grammars
            and self.tool_format is not None
            and can_constrain(self.tool_format)
            and self._has_strict_tools
        ):
            yield STRICT, partial(self._call_or_text, self.tool_format)

    @property
    def _has_strict_tools(self) -> bool:
        return any(tool.definition.strict for tool in self.body.offered_tools)

    def _call_or_answer(self, make: GrammarFactory) -> GrammarSpec:
        spec = make()
        if self.tool_format is None and self.thinking is None:
            return spec
        calls = None if self.tool_format is None else self._offered_calls(self.tool_format)
        before = call_or_answer_grammar(calls, self.thinking, self.marker_ids)
        return msgspec.structs.replace(spec, before=before)

    def _call_or_text(self, tool_format: ToolFormat) -> GrammarSpec:
        calls = self._offered_calls(tool_format)
        return GrammarSpec("lark", call_or_text_grammar(calls, self.thinking, self.marker_ids))

    def _offered_calls(self, tool_format: ToolFormat) -> Calls:
        """The arguments of tools that are not strict may be any object."""
        strict = {tool.definition.name for tool in self.body.offered_tools if tool.definition.strict}
        tools = {name: schema if name in strict else ANY_OBJECT for name, schema in self.schemas.items()}
        return self._calls(tool_format, tools)

    def _forced(self, tool_format: ToolFormat, body_grammars: list[tuple[str, GrammarFactory]]) -> GrammarSpec:
        for _, make in body_grammars:
            make()  # raises the error of a malformed field
        tools = {tool.definition.name: self.schemas[tool.definition.name] for tool in self.body.forced_tools}
        calls = self._calls(tool_format, tools)
        return GrammarSpec("lark", forced_grammar(calls, self.thinking, self.marker_ids))

    def _calls(self, tool_format: ToolFormat, tools: Tools) -> Calls:
        for schema in tools.values():
            schema.check()
        return Calls(tool_format, tools, self.body.max_tool_calls)


def output_plan(context: ServerContext, body: ChatBody, prompt: str) -> OutputPlan:
    formats = output_formats(context)
    tools = _tool_format(formats.tools, body)
    reasoning, thinking = formats.reasoning, None
    if reasoning is not None:
        thinking = Thinking(reasoning, reasoning.begins_inside(prompt, bool(body.continue_final_message)))
    limit = body.thinking_limit(context, thinking)
    if body.separate_reasoning is False and reasoning is not None and reasoning.parse_output is None:
        reasoning = thinking = None
    markers = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
    marker_ids = added_marker_ids(context.tokenizer, markers)
    special_ids = tuple(i for i in marker_ids.values() if i in context.tokenizer.special_ids)
    return OutputPlan(body, tools, thinking, marker_ids, special_ids, _schemas(body.offered_tools), limit)


def check_tools(context: ServerContext, body: ChatBody) -> None:
    """Check before rendering: a chat template may ignore tools. Forced calls need no format of the model's own."""
    if not body.offered_tools or output_formats(context).tools is not None:
        return
    if context.config.tool_call_parser == "none":
        raise InvalidRequestError("tools: --tool_call_parser none turns them off", "tools")
    if not body.forced_tools:
        problem = "the chat template does not show how the model calls tools"
        force = "force a call (tool_choice: required, or a tool's name), which works on any model"
        parsers = f"set --tool_call_parser to its format: {', '.join(TOOL_FORMATS_BY_NAME)}"
        raise InvalidRequestError(f"tools: {problem}; {force}, or {parsers}", "tools")


async def chat_grammar(context: ServerContext, output: OutputPlan) -> GrammarSpec | None:
    """The grammar of the output. An error in the schema of a tool names that schema."""
    try:
        return await requested_grammar(context, output)
    except InvalidRequestError as error:
        if error.param in TOOL_GRAMMARS:
            await _check_each_schema(context, output.body.offered_tools)
        raise


async def _check_each_schema(context: ServerContext, tools: list[Tool]) -> None:
    for index, tool in enumerate(tools):
        name = f"tools.{index}.function.parameters"
        try:
            spec = schema_grammar(tool.definition.parameters or {}, is_strict=False)  # as in the grammar of calls
            await context.grammars.check(context.tokenizer, spec)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name}: {error}", name) from error


def _tool_format(model_format: ToolFormat | None, body: ChatBody) -> ToolFormat | None:
    if not body.offered_tools:
        return None
    return enforceable_format(model_format) if body.forced_tools else model_format


def added_marker_ids(tokenizer: Tokenizer, markers: Iterable[str]) -> dict[str, int]:
    """The ids of the markers that are one token which the tokenizer never splits."""
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers if marker in tokenizer.added_tokens}
    return {marker: token_id for marker, token_id in ids.items() if token_id is not None}


def _schemas(tools: Iterable[Tool]) -> Tools:
    budget = StepBudget()
    return {tool.definition.name: ToolSchema(tool.definition.parameters or {}, budget) for tool in tools}


def arguments_object(text: str) -> Any:
    """The arguments of a call as an object. Truncated arguments give what is complete of them."""
    try:
        value = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}  # invalid arguments stay readable
