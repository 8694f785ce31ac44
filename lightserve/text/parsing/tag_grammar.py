"""Grammars of calls whose arguments are text between tags, for functions with strict arguments.

Arguments come in the order of the schema. A string may be any text up to its end tag, unless the schema lists its
values; any other value is JSON that the schema allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightserve.text.json_schema.tool_schema import ToolSchema
from lightserve.text.parsing.tool_calls.base import CallTags


class TextRules(Protocol):
    """Writes text in a grammar."""

    def text(self, text: str) -> str:
        """A literal text."""

    def text_until(self, rule: str, end: str, inner: Sequence[str] = ()) -> list[str]:
        """A rule for any text up to the first ``end``, and that. The text may have the added tokens ``inner``."""

    def is_added_token(self, text: str) -> bool:
        """Whether the text is an added token of the tokenizer."""

    def json(self, schema: Mapping[str, Any]) -> str:
        """Any JSON that the schema allows."""


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """One call of a function, from its name on. ``index`` makes the names of its rules unique."""

    tags: CallTags
    index: int
    name: str
    schema: ToolSchema

    def rules(self, write: TextRules) -> list[str]:
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

    def _argument(self, rule: str, key: str, write: TextRules) -> list[str]:
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
