"""What a chat's output is taken apart into, and how OpenAI writes the parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import msgspec
import orjson

from lightserve.errors import InvalidRequestError
from lightserve.grammar.compiler import check_nesting
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.grammar_fields import Maker
from lightserve.httpserver.manager import Ask
from lightserve.httpserver.openai_protocol import ChatBody, Tool
from lightserve.io_struct import FinishReason, GrammarSpec, StrOut, ThinkingLimit
from lightserve.model_files.tokenizer import Tokenizer
from lightserve.output_parsing import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Output,
    OutputParser,
    Reasoning,
    ToolCallParser,
)
from lightserve.output_parsing.delta_writer import DeltaWriter, Tools
from lightserve.output_parsing.forced import Thinking, enforceable_format, forced_grammar, thinking_grammar
from lightserve.output_parsing.reasoning import ReasoningFormat, ReasoningParser, reasoning_format
from lightserve.output_parsing.tool_calls.base import ToolFormat
from lightserve.output_parsing.tool_calls.formats import tool_format

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How the model writes tool calls and reasoning; None where it does not."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


def output_formats(context: ServerContext) -> OutputFormats:
    """By the flags, or by the chat template."""
    tokenizer = context.maybe_tokenizer
    template = "" if tokenizer is None else tokenizer.chat_template or ""
    return _formats(context.config.tool_call_parser, context.config.reasoning_parser, template)


@lru_cache(maxsize=4)
def _formats(tools: str, reasoning: str, template: str) -> OutputFormats:
    return OutputFormats(tool_format(tools, template), reasoning_format(reasoning, template))


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answers to one chat are taken apart."""

    body: ChatBody
    tool_format: ToolFormat | None  # None: it may call none
    thinking: Thinking | None  # None: whatever it thinks is content
    special_ids: dict[str, int]  # markers of both that are special tokens
    limit: ThinkingLimit | None = None  # of what it thinks

    @property
    def is_plain(self) -> bool:
        """All of the output is content."""
        return self.tool_format is None and self.thinking is None

    def applied(self, ask: Ask) -> Ask:
        """The same, and the parsers see their markers, and thinking ends in time."""
        if not self.special_ids and self.limit is None:
            return ask
        ids = tuple(self.special_ids.values())
        return replace(ask, params=ask.params.replace(shown_special_ids=ids, thinking=self.limit))

    def new_choice(self) -> ChoiceOutput:
        tools = reasoning = None
        if self.tool_format is not None:
            writer = DeltaWriter(_schemas(self.body.offered_tools), self.tool_format.new_id, self.body.max_tool_calls)
            tools = ToolCallParser(self.tool_format.parse, writer)
        if self.thinking is not None:
            reasoning = ReasoningParser(self.thinking.form, self.thinking.is_begun)
        return ChoiceOutput(OutputParser(reasoning, tools), self.body.include_reasoning is not False)

    def grammars(self) -> Iterator[tuple[str, Maker]]:
        """That which the body asks for, and that of calls it forces: grammar_of refuses both at once."""
        for name, make in self.body.grammars():
            yield name, partial(self._after_thinking, make)
        if self.tool_format is not None and self.body.forced_tools:
            yield "tool_choice", partial(self._forced, self.tool_format)

    def _after_thinking(self, make: Maker) -> GrammarSpec:
        if self.thinking is None:
            return make()
        return msgspec.structs.replace(make(), before=thinking_grammar(self.thinking, self.special_ids))

    def _forced(self, form: ToolFormat) -> GrammarSpec:
        tools = _schemas(self.body.forced_tools)
        for schema in tools.values():
            check_nesting(schema)
        text = forced_grammar(form, tools, self.body.max_tool_calls, self.thinking, self.special_ids)
        return GrammarSpec("lark", text)


def output_plan(context: ServerContext, body: ChatBody, prompt: str) -> OutputPlan:
    formats = output_formats(context)
    form = _tool_format(formats.tools, body)
    reasoning, thinking = formats.reasoning, None
    if reasoning is not None:
        thinking = Thinking(reasoning, reasoning.begins_inside(prompt, bool(body.continue_final_message)))
    limit = body.thinking_limit(context, thinking)
    if body.separate_reasoning is False:
        reasoning = thinking = None
    markers = (*(form.markers if form else ()), *((reasoning.begin, reasoning.end) if reasoning else ()))
    return OutputPlan(body, form, thinking, _special_ids(context.tokenizer, markers), limit)


def check_tools(context: ServerContext, body: ChatBody) -> None:
    """Before the chat template is asked, which might leave them out in silence."""
    if body.offered_tools and output_formats(context).tools is None:
        found = "tools: the model's chat template does not show how it calls tools; --tool_call_parser can tell"
        raise InvalidRequestError(found, "tools")


def _tool_format(form: ToolFormat | None, body: ChatBody) -> ToolFormat | None:
    if form is None or not body.offered_tools:
        return None
    return enforceable_format(form) if body.forced_tools else form


def _special_ids(tokenizer: Tokenizer, markers: Iterable[str]) -> dict[str, int]:
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers if marker in tokenizer.special_tokens}
    return {marker: token_id for marker, token_id in ids.items() if token_id is not None}


def _schemas(tools: Iterable[Tool]) -> Tools:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


class ChoiceOutput:
    """One answer as it comes, taken apart."""

    def __init__(self, parser: OutputParser, shows_reasoning: bool) -> None:
        self.reasoning_tokens = 0  # the tags count
        self.is_hidden = False  # the last token belongs to reasoning that is not shown
        self._has_calls = False
        self._parser = parser
        self._shows_reasoning = shows_reasoning

    def push(self, out: StrOut) -> list[Delta]:
        is_reasoning = self._parser.is_reasoning
        deltas = self._parser.push(out.text)
        is_reasoning = is_reasoning or self._parser.is_reasoning
        if out.finish_reason is not None:
            deltas += self._parser.finish()
        self.reasoning_tokens += is_reasoning
        self.is_hidden = is_reasoning and not self._shows_reasoning
        self._has_calls = self._has_calls or any(isinstance(delta, CallStart) for delta in deltas)
        if self._shows_reasoning:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, Reasoning)]

    def finish_reason(self, reason: FinishReason) -> str:
        return "tool_calls" if self._has_calls and reason is FinishReason.STOP else reason.value


def message_of(output: Output) -> Object:
    """A whole answer."""
    content = output.content if output.content or not output.calls else None
    message: Object = {"role": "assistant", "content": content, "refusal": None}
    if output.reasoning:
        message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
    if output.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.calls
        ]
    return message


def delta_json(delta: Delta) -> bytes:
    """A piece of one, as a member of a choice."""
    return b'"delta":' + orjson.dumps(_delta(delta))


def _delta(delta: Delta) -> Object:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
