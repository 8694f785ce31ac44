"""Grammars of answers that think first and of tool calls that are forced, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.output_parsing.reasoning import ReasoningFormat
from lightserve.output_parsing.scribe import Tools
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording
from lightserve.output_parsing.tool_calls.llama3_json import LLAMA3_JSON

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# White space without end is what small models fall into; what a grammar cannot enforce of a schema is left to the tool.
OPTIONS: dict[str, Any] = {"x-guidance": {"lenient": True, "whitespace_pattern": r"[ \t\n\r]{1,16}"}}
_PLACES = re.compile(r"\{(name|arguments|number)\}")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What may come before the calls."""

    form: ReasoningFormat
    is_begun: bool  # in the prompt: the answer begins within the tags


def forcible(form: ToolFormat) -> ToolFormat:
    """The format in which calls are forced: the model's own, or one in JSON where a grammar cannot write that."""
    return LLAMA3_JSON if form.wording is None else form


def forced_grammar(
    form: ToolFormat, tools: Tools, max_calls: int | None, thinking: Thinking | None, special_ids: Mapping[str, int]
) -> str:
    """One call or more of these tools and nothing else, but for reasoning before them.

    ``special_ids`` are the markers that are tokens of their own, which a grammar names by their ids.
    """
    wording = form.wording or Wording("")
    write = _Writer(special_ids)
    more = "" if max_calls == 1 else f"({write.text(wording.between)} call)*"
    before = "" if thinking is None else "thinking" if thinking.is_begun else "thinking?"
    lines = [
        f"start: {before} {write.text(wording.begin)} call {more} {write.text(wording.end)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, (name, schema) in enumerate(tools.items()):
        lines.append(f"call_{i}: {write.call(wording.call, name, i)}")
        lines.append(f"arguments_{i}: %json {json.dumps({**(schema or NO_ARGUMENTS), **OPTIONS})}")
    if thinking is not None:
        lines += write.thinking(thinking)
    return "\n".join([*lines, "NUMBER: /[0-9]{1,3}/", ""])


def thinking_grammar(thinking: Thinking, special_ids: Mapping[str, int]) -> str:
    """Reasoning, and after it @answer."""
    before = "thinking" if thinking.is_begun else "thinking?"
    return "\n".join([f"start: {before} @answer", *_Writer(special_ids).thinking(thinking), ""])


class _Writer:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        markers = sorted(special_ids, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, markers))) if markers else None

    def text(self, text: str) -> str:
        """A literal text, with its special tokens by their ids."""
        if not text:
            return ""
        if self._markers is None:
            return _quoted(text)
        plain = [_quoted(piece) if piece else "" for piece in self._markers.split(text)]
        special = [f"<[{self._special_ids[marker]}]>" for marker in self._markers.findall(text)]
        return " ".join(piece for pair in zip(plain, [*special, ""], strict=True) for piece in pair if piece)

    def call(self, wording: str, name: str, index: int) -> str:
        rules = {"name": _quoted(name), "arguments": f"arguments_{index}", "number": "NUMBER"}
        pieces = _PLACES.split(wording)  # text, place, text, place, ... text
        return " ".join(rules[piece] if i % 2 else self.text(piece) for i, piece in enumerate(pieces))

    def thinking(self, thinking: Thinking) -> list[str]:
        """Any text up to the first tag that ends it."""
        begin, end = thinking.form.begin, thinking.form.end
        opening = "" if thinking.is_begun else self.text(begin)
        is_special = end in self._special_ids  # then no text contains it
        return [
            f"thinking: {opening} thought {self.text(end) if is_special else ''} SPACE",
            "thought: TEXT" if is_special else f"thought[suffix={_quoted(end)}]: TEXT",
            "TEXT: /(?s:.*)/",
            r"SPACE: /[ \t\r\n]{0,16}/",
        ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
