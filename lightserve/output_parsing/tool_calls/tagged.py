"""Arguments as pairs of tags, each a key and a value: GLM 4.5 and later, Qwen3-Coder.

A value is text. What the tool's schema calls a string stays one; any other is read as JSON where it is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lightserve.output_parsing.json_text import parsed
from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, is_name, pass_raw

BEGIN, END = "<tool_call>", "</tool_call>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    before_name: str
    after_name: str  # "": a line break, or whatever comes after the name
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    after_call: str = ""  # besides END

    def parse(self, tape: Tape, scribe: Scribe) -> Steps[None]:
        while (yield from tape.pass_until((BEGIN,), scribe.content)):
            tape.mark(len(BEGIN))
            name = yield from self._read_name(tape)
            if not is_name(name):
                scribe.content(tape.unmark())
                continue
            tape.unmark()
            scribe.start(name)
            yield from self._pass_arguments(tape, scribe, name)
            yield from tape.accept_next(self.after_call)
            yield from tape.accept_next(END)

    def _read_name(self, tape: Tape) -> Steps[str]:
        if not (yield from tape.accept_next(self.before_name)):
            return ""
        ends = (self.after_name,) if self.after_name else ("\n", self.before_key, END)
        name, end = yield from tape.read_until(ends)
        if end in (self.before_key, END):
            tape.at -= len(end)
        return name.strip() if end else ""

    def _pass_arguments(self, tape: Tape, scribe: Scribe, name: str) -> Steps[None]:
        opening = "{"
        while True:
            yield from tape.skip_space()
            tape.mark()
            if not (yield from tape.accept(self.before_key)):
                break
            pair = yield from self._read_pair(tape, scribe, name)
            if pair is None:
                scribe.arguments(opening + tape.unmark())
                yield from pass_raw(tape, scribe, (END,))
                return
            scribe.arguments(opening + pair)
            opening = ", "
        tape.rewind()
        tape.unmark()
        scribe.arguments("{}" if opening == "{" else "}")

    def _read_pair(self, tape: Tape, scribe: Scribe, name: str) -> Steps[str | None]:
        """As a member of a JSON object; None where it is cut short."""
        key, end = yield from tape.read_until((self.after_key,))
        if not end or (self.before_value and not (yield from tape.accept_next(self.before_value))):
            return None
        text, end = yield from tape.read_until((self.after_value,))
        if not end:
            return None
        if not self.before_value:  # then the value is on lines of its own
            text = text.removeprefix("\n").removesuffix("\n")
        key = key.strip()
        value = _value(text, _type_of(scribe.tools.get(name), key))
        return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    stripped = text.strip()
    json_text = _PYTHON.get(stripped, stripped)
    value = parsed(json_text)
    return text if value is None and json_text != "null" else value


def _type_of(schema: Any, key: str) -> Any:
    """Schemas are the client's: any part may be anything."""
    for part in ("properties", key, "type"):
        schema = schema.get(part) if isinstance(schema, dict) else None
    return schema


GLM45 = ToolFormat(
    "glm45",
    Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>").parse,
    signs=("<arg_key>",),
    markers=(BEGIN, END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>").parse,
    signs=("<function=",),
    markers=(BEGIN, END),
)
