"""The output of a chat: parsed into reasoning, content and tool calls, constrained by its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import msgspec
from pydantic_core import from_json

from lightserve.errors import InvalidRequestError
from lightserve.grammar.compiler import check_nesting, schema_grammar
from lightserve.httpserver.chat.request import ChatBody, Tool
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.grammar import GrammarFactory, requested_grammar
from lightserve.httpserver.manager import PromptRequest
from lightserve.io_struct import GrammarSpec, StrOut, ThinkingLimit
from lightserve.model_files.tokenizer import Tokenizer
from lightserve.output_parsing import Delta, OutputParser, Reasoning
from lightserve.output_parsing.delta_writer import DeltaWriter, Tools, call_id
from lightserve.output_parsing.parser import parse_content
from lightserve.output_parsing.reasoning import ReasoningFormat, ReasoningParser, reasoning_format
from lightserve.output_parsing.tool_calls.base import ToolFormat
from lightserve.output_parsing.tool_calls.formats import tool_format
from lightserve.output_parsing.tool_grammar import (
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
    special_ids: dict[str, int]  # marker: id, where a marker of either format is a special token
    limit: ThinkingLimit | None = None  # of its reasoning tokens

    @property
    def is_plain(self) -> bool:
        """The whole output is content."""
        return self.tool_format is None and self.thinking is None

    def apply(self, prompt_request: PromptRequest) -> PromptRequest:
        """The same request, where the text keeps the markers for the parsers and the engine limits reasoning."""
        params = prompt_request.params.replace(
            shown_special_ids=tuple(self.special_ids.values()),
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
        offered = _schemas(self.body.offered_tools)
        separates = self.body.separate_reasoning is not False
        parser = OutputParser(parse, DeltaWriter(offered, new_id, self.body.max_tool_calls, separates))
        return ChoiceParser(parser, self.body.include_reasoning is not False)

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        """The grammar of the output, and the field that asks for it. requested_grammar refuses two.

        A call that is forced is the whole output: then a grammar of the answer has no effect. Otherwise the model calls
        tools or answers by its grammar.
        """
        own = list(self.body.grammars())
        if self.tool_format is not None and self.body.forced_tools:
            yield FORCED, partial(self._forced, self.tool_format, own)
            return
        for name, make in own:
            yield name, partial(self._call_or_answer, make)
        if not own and self.tool_format is not None and can_constrain(self.tool_format) and self._has_strict_tools:
            yield STRICT, partial(self._call_or_text, self.tool_format)

    @property
    def _has_strict_tools(self) -> bool:
        return any(tool.function.strict for tool in self.body.offered_tools)

    def _call_or_answer(self, make: GrammarFactory) -> GrammarSpec:
        spec = make()
        if self.tool_format is None and self.thinking is None:
            return spec
        calls = None if self.tool_format is None else self._offered_calls(self.tool_format)
        before = call_or_answer_grammar(calls, self.thinking, self.special_ids)
        return msgspec.structs.replace(spec, before=before)

    def _call_or_text(self, tool_format: ToolFormat) -> GrammarSpec:
        calls = self._offered_calls(tool_format)
        return GrammarSpec("lark", call_or_text_grammar(calls, self.thinking, self.special_ids))

    def _offered_calls(self, tool_format: ToolFormat) -> Calls:
        """The arguments of tools that are not strict may be any object."""
        strict = _schemas(tool for tool in self.body.offered_tools if tool.function.strict)
        _check_schemas(strict)
        names = [tool.function.name for tool in self.body.offered_tools]
        return Calls(tool_format, {name: strict.get(name, ANY_OBJECT) for name in names}, self.body.max_tool_calls)

    def _forced(self, tool_format: ToolFormat, own: list[tuple[str, GrammarFactory]]) -> GrammarSpec:
        for _, make in own:
            make()  # raises the error of a malformed field
        tools = _schemas(self.body.forced_tools)
        _check_schemas(tools)
        calls = Calls(tool_format, tools, self.body.max_tool_calls)
        return GrammarSpec("lark", forced_grammar(calls, self.thinking, self.special_ids))


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
    return OutputPlan(body, tools, thinking, _special_ids(context.tokenizer, markers), limit)


def check_tools(context: ServerContext, body: ChatBody) -> None:
    """Check before rendering: a chat template may ignore tools."""
    if body.offered_tools and output_formats(context).tools is None:
        found = "tools: the chat template does not show how the model calls tools; set --tool_call_parser"
        raise InvalidRequestError(found, "tools")


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
            spec = schema_grammar(tool.function.parameters or {}, is_strict=False)  # as in the grammar of calls
            await context.grammars.check(context.tokenizer, spec)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name}: {error}", name) from error


def _tool_format(model_format: ToolFormat | None, body: ChatBody) -> ToolFormat | None:
    if model_format is None or not body.offered_tools:
        return None
    return enforceable_format(model_format) if body.forced_tools else model_format


def _special_ids(tokenizer: Tokenizer, markers: Iterable[str]) -> dict[str, int]:
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers if marker in tokenizer.special_tokens}
    return {marker: token_id for marker, token_id in ids.items() if token_id is not None}


def _check_schemas(tools: Tools) -> None:
    for schema in tools.values():
        check_nesting(schema)


def _schemas(tools: Iterable[Tool]) -> Tools:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def arguments_object(text: str) -> Any:
    """The arguments of a call as an object. Truncated arguments give what is complete of them."""
    try:
        value = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}  # invalid arguments stay readable


class ChoiceParser:
    """Parses the output of one choice as its tokens arrive."""

    def __init__(self, parser: OutputParser, shows_reasoning: bool) -> None:
        self.reasoning_tokens = 0  # including the tags
        self.is_hidden = False  # the last token is reasoning that the response leaves out
        self._parser = parser
        self._writer = parser.writer
        self._shows_reasoning = shows_reasoning
        self._is_cut = False
        self._undecided_tokens = 0  # of reasoning or of a call in it: the tokens that follow decide

    def push(self, out: StrOut) -> list[Delta]:
        writer = self._writer
        is_reasoning = writer.is_reasoning
        deltas = self._parser.push(out.text)
        is_reasoning = is_reasoning or writer.is_reasoning
        if is_reasoning:
            if writer.is_undecided or self._undecided_tokens:
                self._count_undecided()
            else:
                self.reasoning_tokens += 1
        if out.finish_reason is not None:
            deltas += self._finish(out)
        if self._shows_reasoning:
            return deltas
        self.is_hidden = is_reasoning
        return [delta for delta in deltas if not isinstance(delta, Reasoning)]

    @property
    def has_calls(self) -> bool:
        """Whether there is a call. One that a stop string cut off does not count: its arguments are not JSON."""
        return self._writer.has_calls and not self._is_cut

    def _count_undecided(self) -> None:
        if self._writer.is_undecided:
            self._undecided_tokens += 1
        else:
            self.reasoning_tokens += 1 + self._undecided_tokens
            self._undecided_tokens = 0

    def _finish(self, out: StrOut) -> list[Delta]:
        deltas = self._parser.finish()
        self._is_cut = self._writer.is_call_open and isinstance(out.stop_reason, str)
        return deltas
