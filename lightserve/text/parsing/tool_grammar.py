"""Grammars for reasoning, tool calls and answers, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightserve.text.json_schema.tool_schema import ToolSchema
from lightserve.text.parsing.delta_writer import Tools
from lightserve.text.parsing.reasoning import ReasoningFormat
from lightserve.text.parsing.tool_calls.base import CallTags, CallTemplate, ToolFormat
from lightserve.text.parsing.tool_calls.llama3_json import LLAMA3_JSON

ANY_OBJECT = ToolSchema({"type": "object"})
# Small models tend to emit endless white space. Schema rules that a grammar cannot enforce are left to the tool.
OPTIONS: dict[str, Any] = {"x-guidance": {"lenient": True, "whitespace_pattern": r"[ \t\n\r]{1,16}"}}
_PLACEHOLDERS = re.compile(r"\{(name|arguments|number)\}")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that may come before the calls."""

    reasoning_format: ReasoningFormat
    is_begun: bool  # the prompt has the first tag: the output starts inside the reasoning


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that a grammar allows."""

    tool_format: ToolFormat
    tools: Tools
    max_calls: int | None = None
    is_json: bool = False  # write a call as a JSON schema: the lexer must not see other literals than in a JSON answer


def enforceable_format(tool_format: ToolFormat | None) -> ToolFormat:
    """The format for forced calls: the model's own, or a JSON format if it has none that a grammar can express."""
    return LLAMA3_JSON if tool_format is None or tool_format.call_template is None else tool_format


def can_constrain(tool_format: ToolFormat) -> bool:
    """Whether a grammar can express the arguments in this format."""
    return tool_format.call_template is not None or tool_format.tags is not None


def forced_grammar(calls: Calls, thinking: Thinking | None, marker_ids: Mapping[str, int]) -> str:
    """A grammar of one or more calls of these tools, with reasoning before them if ``thinking`` is given.

    ``marker_ids`` are the markers that are added tokens of the tokenizer, special or not: llguidance takes such a token
    for no text, so a grammar refers to it by id.
    """
    write = _GrammarWriter(marker_ids, thinking)
    return write.grammar("calls", write.calls(calls))


def call_or_answer_grammar(calls: Calls | None, thinking: Thinking | None, marker_ids: Mapping[str, int]) -> str:
    """A grammar of calls or of @answer, with reasoning before them. ``calls`` None: only of @answer."""
    write = _GrammarWriter(marker_ids, thinking)
    answer = f"{write.answer_begin} @answer"
    if calls is None:
        return write.grammar(answer, [])
    if _first_marker(calls.tool_format) is None:
        calls = replace(calls, is_json=True)
    return write.grammar(f"(calls | {answer})", write.calls(calls))


def call_or_text_grammar(calls: Calls, thinking: Thinking | None, marker_ids: Mapping[str, int]) -> str:
    """A grammar of any text with calls in it, or instead of it where no marker begins a call."""
    write = _GrammarWriter(marker_ids, thinking)
    marker = _first_marker(calls.tool_format)
    if marker is None:
        text = f"{write.answer_begin} TEXT" if write.answer_begin else "NO_JSON"
        rules = [*write.calls(calls), r"NO_JSON: /(?s:.*)/ & ~/[ \t\r\n]*[{\[](?s:.*)/"]
        return write.grammar(f"(calls | {text})", rules)
    repeat = "?" if calls.max_calls == 1 else "*"
    rules = [*write.calls(calls, without=marker), *write.text_until("text_before_call", marker)]
    tags, before_call = calls.tool_format.tags, "text_before_call calls"
    if tags is not None and tags.after_call:  # a model may omit the marker
        before_call += " | text_before_name named"
        rules += write.text_until("text_before_name", tags.before_name)
    return write.grammar(f"({before_call}){repeat} TEXT", rules)


def _first_marker(tool_format: ToolFormat) -> str | None:
    """The marker with which calls begin."""
    if tool_format.tags is not None:
        return tool_format.tags.begin
    template = tool_format.call_template or CallTemplate("")
    return next(
        (begin for begin in tool_format.call_begins if (template.begin + template.call).startswith(begin)), None
    )


class _GrammarWriter:
    def __init__(self, marker_ids: Mapping[str, int], thinking: Thinking | None) -> None:
        self._marker_ids = marker_ids
        self._thinking = thinking
        markers = sorted(marker_ids, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, markers))) if markers else None
        self.answer_begin = "" if thinking is None else self.text(thinking.reasoning_format.answer_begin)

    def grammar(self, start: str, rules: list[str]) -> str:
        """The whole grammar: reasoning, then ``start``."""
        thinking = self._thinking
        before = "" if thinking is None else "thinking" if thinking.is_begun else "thinking?"
        thinking_rules = [] if thinking is None else self._thinking_rules(thinking)
        common = ["NUMBER: /[0-9]{1,3}/", "TEXT: /(?s:.*)/", r"SPACE: /[ \t\r\n]{1,16}/", ""]
        return "\n".join([f"start: {before} {start}", *rules, *thinking_rules, *common])

    def calls(self, calls: Calls, without: str = "") -> list[str]:
        """Rules for one or more calls. ``without``: the marker at their beginning, which another rule has read."""
        template = calls.tool_format.call_template
        if calls.tool_format.tags is not None:
            return self._tagged_calls(calls, calls.tool_format.tags, without)
        if template is None:
            return self._loose_calls(calls)
        begin, call, more = template.begin, template.call, template.between
        if without and begin:
            begin = begin.removeprefix(without)
        elif without:  # a further call begins with the marker too
            call, more = call.removeprefix(without), ""
        is_one = calls.max_calls == 1 or (without and not template.begin)
        repeat = "" if is_one else f"({self.text(more)} call)*"
        rules = [f"calls: {self.text(begin)} call {repeat} {self.text(template.end)} {_space_after(without)}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(calls.tools))))
        for i, (name, schema) in enumerate(calls.tools.items()):
            if calls.is_json and call.startswith("{"):
                rules.append(f"call_{i}: {self.json(_call_schema(call, name, schema.closed))}")
            else:
                rules.append(f"call_{i}: {self._call(call, name, i)}")
                rules.append(f"arguments_{i}: {self.json(schema.closed)}")
        return rules

    def _tagged_calls(self, calls: Calls, tags: CallTags, without: str) -> list[str]:
        begin = "" if without else self.text(tags.begin)
        if tags.after_call:
            call = f"SPACE? {self.text(tags.before_name)} named"
            more = "" if calls.max_calls == 1 else f"({call})*"
            section = f"{begin} {call} {more} SPACE? {self.text(tags.end)}"
        else:
            section = f"{begin} SPACE? named"
        repeat = "" if calls.max_calls == 1 or without else f"(SPACE? {section})*"
        rules = [f"calls: {section} {repeat} {_space_after(without)}"]
        rules.append("named: " + " | ".join(f"named_{i}" for i in range(len(calls.tools))))
        for i, (name, schema) in enumerate(calls.tools.items()):
            rules += TaggedCall(tags, i, name, schema).rules(self)
        return rules

    def is_added_token(self, text: str) -> bool:
        return text in self._marker_ids

    def json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, **OPTIONS})}"

    def _loose_calls(self, calls: Calls) -> list[str]:
        """Rules for calls in a format whose arguments are not JSON: the markers, and any text between them."""
        begin, end = calls.tool_format.loose_call
        inner = [self.text(marker) for marker in calls.tool_format.markers if marker in self._marker_ids]
        repeat = "" if calls.max_calls == 1 else "(SPACE? call)*"
        return [
            f"calls: call {repeat} SPACE?",
            f"call: {self.text(begin)} call_text",
            *self.text_until(
                "call_text",
                end,
                [marker_text for marker_text in inner if marker_text not in (self.text(begin), self.text(end))],
            ),
        ]

    def text_until(self, rule: str, end: str, inner: Sequence[str] = ()) -> list[str]:
        """A rule for any text up to the first ``end``, and that. The text may have the added tokens ``inner``."""
        if (text := self.text(end)).startswith("<["):  # plain text cannot contain an added token
            pieces = f"(TEXT ({' | '.join(inner)}))*" if inner else ""
            return [f"{rule}: {pieces} TEXT {text}"]
        return [f"{rule}[suffix={_quoted(end)}]: TEXT"]

    def text(self, text: str) -> str:
        """A literal text, with added tokens referred to by id."""
        if not text:
            return ""
        if self._markers is None:
            return _quoted(text)
        plain = [_quoted(piece) if piece else "" for piece in self._markers.split(text)]
        special = [f"<[{self._marker_ids[marker]}]>" for marker in self._markers.findall(text)]
        return " ".join(piece for pair in zip(plain, [*special, ""], strict=True) for piece in pair if piece)

    def _call(self, call_template: str, name: str, index: int) -> str:
        rules = {"name": _quoted(name), "arguments": f"arguments_{index}", "number": "NUMBER"}
        pieces = _PLACEHOLDERS.split(call_template)  # text, placeholder, text, placeholder, ... text
        return " ".join(rules[piece] if i % 2 else self.text(piece) for i, piece in enumerate(pieces))

    def _thinking_rules(self, thinking: Thinking) -> list[str]:
        """Rules for any text up to the first end tag."""
        tags = thinking.reasoning_format
        opening = "" if thinking.is_begun else self.text(tags.begin)
        return [
            f"thinking: {opening} thought AFTER_THOUGHT {self.text(tags.after_end)}",
            *self.text_until("thought", tags.end),
            r"AFTER_THOUGHT: /[ \t\r\n]{0,16}/",
        ]


def _space_after(without: str) -> str:
    """What may follow the last call. Models write a line break there, and must be able to end after it."""
    return "" if without else "SPACE?"  # with a marker that another rule has read, any text may follow


def _call_schema(call_template: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a whole call. References of the arguments' schema lead to the root of the schema."""
    key = "parameters" if '"parameters"' in call_template else "arguments"
    definitions = {"$defs": arguments["$defs"]} if "$defs" in arguments else {}
    members = {"name": {"const": name}, key: dict(arguments)}
    members_only = {"properties": members, "required": [*members], "additionalProperties": False}
    return {**definitions, "type": "object", **members_only}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """One call of a function with strict arguments, which are text between tags, from its name on.

    Arguments come in the order of the schema. A string may be any text up to its end tag, unless the schema lists its
    values; any other value is JSON that the schema allows. ``index`` makes the names of the rules unique.
    """

    tags: CallTags
    index: int
    name: str
    schema: ToolSchema

    def rules(self, write: _GrammarWriter) -> list[str]:
        rule, name = f"named_{self.index}", write.text(self.name + self.tags.after_name)
        end = self.tags.after_call or self.tags.end
        if not self.schema.lists_arguments:  # any arguments
            inner = [write.text(tag) for tag in self._argument_tags if write.is_added_token(tag)]
            return [f"{rule}: {name} rest_{self.index}", *write.text_until(f"rest_{self.index}", end, inner)]
        arguments, rules = "", []
        for i, key in enumerate(self.schema.properties):
            argument = f"argument_{self.index}_{i}"
            arguments += f"(SPACE? {argument}){'' if key in self.schema.required else '?'} "
            rules += self._argument(argument, key, write)
        return [f"{rule}: {name} {arguments}SPACE? {write.text(end)}", *rules]

    @property
    def _argument_tags(self) -> tuple[str, ...]:
        tags = self.tags
        return tags.before_key, tags.after_key, tags.before_value, tags.after_value

    def _argument(self, rule: str, key: str, write: _GrammarWriter) -> list[str]:
        tags = self.tags
        head = write.text(tags.before_key + key + tags.after_key)
        if tags.before_value:
            head += f" SPACE? {write.text(tags.before_value)}"
        value, end = f"{rule}_value", write.text(tags.after_value)
        listed = _listed_strings(self.schema.properties[key])
        if listed:
            line = "" if tags.before_value else '"\\n"?'
            return [f"{rule}: {head} {line} ({' | '.join(map(write.text, listed))}) {line} {end}"]
        if "string" in self.schema.types(key):
            return [f"{rule}: {head} {value}", *write.text_until(value, tags.after_value)]
        return [
            f"{rule}: {head} SPACE? {value} SPACE? {end}",
            f"{value}: {write.json(self.schema.closed_argument(key))}",
        ]


def _listed_strings(schema: Any) -> list[str]:
    """The values of an argument, if all of them are strings without line breaks."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(text, str) and text and "\n" not in text for text in values):
        return []
    return values
