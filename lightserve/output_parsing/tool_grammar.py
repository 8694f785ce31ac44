"""Grammars for reasoning before an answer and for forced tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.output_parsing.delta_writer import Tools
from lightserve.output_parsing.reasoning import ReasoningFormat
from lightserve.output_parsing.tool_calls.base import CallTemplate, ToolFormat
from lightserve.output_parsing.tool_calls.llama3_json import LLAMA3_JSON

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Small models tend to emit endless white space. Schema rules that a grammar cannot enforce are left to the tool.
OPTIONS: dict[str, Any] = {"x-guidance": {"lenient": True, "whitespace_pattern": r"[ \t\n\r]{1,16}"}}
_PLACEHOLDERS = re.compile(r"\{(name|arguments|number)\}")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that may come before the calls."""

    reasoning_format: ReasoningFormat
    is_begun: bool  # the prompt has the first tag: the output starts inside the reasoning


def enforceable_format(tool_format: ToolFormat) -> ToolFormat:
    """The format for forced calls: the model's own, or a JSON format if a grammar cannot express that."""
    return LLAMA3_JSON if tool_format.call_template is None else tool_format


def forced_grammar(
    tool_format: ToolFormat,
    tools: Tools,
    max_calls: int | None,
    thinking: Thinking | None,
    special_ids: Mapping[str, int],
) -> str:
    """A grammar of one or more calls of these tools, with reasoning before them if ``thinking`` is given.

    ``special_ids`` are the markers that are special tokens: a grammar refers to those by id.
    """
    call_template = tool_format.call_template or CallTemplate("")
    write = _GrammarWriter(special_ids)
    more = "" if max_calls == 1 else f"({write.text(call_template.between)} call)*"
    before = "" if thinking is None else "thinking" if thinking.is_begun else "thinking?"
    lines = [
        f"start: {before} {write.text(call_template.begin)} call {more} {write.text(call_template.end)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, (name, schema) in enumerate(tools.items()):
        lines.append(f"call_{i}: {write.call(call_template.call, name, i)}")
        lines.append(f"arguments_{i}: %json {json.dumps({**(schema or NO_ARGUMENTS), **OPTIONS})}")
    if thinking is not None:
        lines += write.thinking(thinking)
    return "\n".join([*lines, "NUMBER: /[0-9]{1,3}/", ""])


def thinking_grammar(thinking: Thinking, special_ids: Mapping[str, int]) -> str:
    """A grammar of reasoning followed by @answer."""
    before = "thinking" if thinking.is_begun else "thinking?"
    return "\n".join([f"start: {before} @answer", *_GrammarWriter(special_ids).thinking(thinking), ""])


class _GrammarWriter:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        markers = sorted(special_ids, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, markers))) if markers else None

    def text(self, text: str) -> str:
        """A literal text, with special tokens referred to by id."""
        if not text:
            return ""
        if self._markers is None:
            return _quoted(text)
        plain = [_quoted(piece) if piece else "" for piece in self._markers.split(text)]
        special = [f"<[{self._special_ids[marker]}]>" for marker in self._markers.findall(text)]
        return " ".join(piece for pair in zip(plain, [*special, ""], strict=True) for piece in pair if piece)

    def call(self, call_template: str, name: str, index: int) -> str:
        rules = {"name": _quoted(name), "arguments": f"arguments_{index}", "number": "NUMBER"}
        pieces = _PLACEHOLDERS.split(call_template)  # text, placeholder, text, placeholder, ... text
        return " ".join(rules[piece] if i % 2 else self.text(piece) for i, piece in enumerate(pieces))

    def thinking(self, thinking: Thinking) -> list[str]:
        """Rules for any text up to the first end tag."""
        begin, end = thinking.reasoning_format.begin, thinking.reasoning_format.end
        opening = "" if thinking.is_begun else self.text(begin)
        is_special = end in self._special_ids  # then plain text cannot contain it
        return [
            f"thinking: {opening} thought {self.text(end) if is_special else ''} SPACE",
            "thought: TEXT" if is_special else f"thought[suffix={_quoted(end)}]: TEXT",
            "TEXT: /(?s:.*)/",
            r"SPACE: /[ \t\r\n]{0,16}/",
        ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
