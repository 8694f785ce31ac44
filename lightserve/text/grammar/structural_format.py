"""Structural tags of the newer kind, as xgrammar, vLLM and SGLang have them: a tree of formats, as a Lark grammar.

{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
    {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lightserve.errors import InvalidRequestError
from lightserve.text.json_schema.closing import closed_schema
from lightserve.text.json_schema.schema import JsonSchema, StepBudget

Node = dict[str, Any]

MAX_DEPTH = 32
MAX_NODES = 512
MAX_REPEATS = 1000
ANY_TEXT = "any_text"
WHITESPACE = r"[ \t\n\r]{1,16}"  # in JSON: small models emit endless white space
_SPECIAL_FORM = re.compile(r"<[^<>\s\[\]]+>")  # how Lark names a token


def with_closed_schemas(node: Any, budget: StepBudget, depth: int = 0) -> Any:
    """The same format, with closed objects in its schemas."""
    if depth > 2 * MAX_DEPTH:
        raise InvalidRequestError(f"a structural tag may have {MAX_DEPTH} levels of formats")
    if isinstance(node, list):
        return [with_closed_schemas(item, budget, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and isinstance(node.get("json_schema"), dict):
        return node | {"json_schema": closed_schema(JsonSchema(node["json_schema"], budget))}
    return {name: with_closed_schemas(value, budget, depth + 1) for name, value in node.items()}


def format_grammar(node: Any, added_tokens: Collection[str]) -> str:
    """``added_tokens``: what the tokenizer never splits; such a text is matched as that token."""
    rules = _Rules(added_tokens)
    start = rules.expression(node, 0)
    return "\n".join(["%llguidance {}", f"start: {start}", r"TAG_TEXT: /(.|\n)*/", *rules.lines, ""])


class _Rules:
    def __init__(self, added_tokens: Collection[str]) -> None:
        self.lines: list[str] = []
        self._n_nodes = 0
        special = sorted(filter(_SPECIAL_FORM.fullmatch, added_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._kinds: dict[str, Callable[[Node, int], str]] = {
            "const_string": lambda node, _: self._literal(_text(node, "value")),
            "json_schema": lambda node, _: _json(node),
            ANY_TEXT: lambda node, _: "TAG_TEXT",
            "regex": lambda node, _: _regex(node),
            "sequence": self._sequence,
            "or": self._any_of,
            "tag": self._tag,
            "optional": lambda node, depth: f"({self._content(node, depth)})?",
            "star": lambda node, depth: f"({self._content(node, depth)})*",
            "plus": lambda node, depth: f"({self._content(node, depth)})+",
            "repeat": self._repeat,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, node: Any, depth: int) -> str:
        self._n_nodes += 1
        if depth > MAX_DEPTH or self._n_nodes > MAX_NODES:
            raise InvalidRequestError(f"a structural tag may have {MAX_DEPTH} levels and {MAX_NODES} formats")
        kind = node.get("type") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise InvalidRequestError(
                f"a format of a structural tag must have one of the types {', '.join(self._kinds)}; found {kind!r:.100}"
            )
        return self._kinds[kind](node, depth)

    def _content(self, node: Node, depth: int) -> str:
        return self.expression(node.get("content"), depth + 1)

    def _sequence(self, node: Node, depth: int) -> str:
        elements = _list(node, "elements")
        if any(_kind(element) == ANY_TEXT for element in elements[:-1]):
            raise InvalidRequestError("any_text in a sequence must be its last element, or the content of a tag")
        return " ".join(f"({self.expression(element, depth + 1)})" for element in elements)

    def _any_of(self, node: Node, depth: int) -> str:
        return " | ".join(f"({self.expression(element, depth + 1)})" for element in _list(node, "elements"))

    def _repeat(self, node: Node, depth: int) -> str:
        least, most = node.get("min", 0), node.get("max", MAX_REPEATS)
        most = MAX_REPEATS if most in (-1, None) else most
        if type(least) is not int or type(most) is not int or not 0 <= least <= most <= MAX_REPEATS:
            raise InvalidRequestError(f"min and max of a repeat must be whole numbers up to {MAX_REPEATS}")
        return f"({self._content(node, depth)}){{{least},{most}}}"

    def _tag(self, node: Node, depth: int) -> str:
        return f"{self._literal(_text(node, 'begin'))} {self._rest(node, depth)}"

    def _rest(self, node: Node, depth: int) -> str:
        """What follows the begin of a tag."""
        ends = node.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise InvalidRequestError("the end of a tag must be a string, or a list of strings")
        if _kind(node.get("content")) == ANY_TEXT:
            return "(" + " | ".join(self._until(end) for end in ends) + ")"
        content = self.expression(node.get("content"), depth + 1)
        return f"({content}) (" + " | ".join(map(self._literal, ends)) + ")"

    def _triggered_tags(self, node: Node, depth: int) -> str:
        tags, triggers = _tags(node), _list(node, "triggers")
        triggered = " | ".join(self._triggered(tag, triggers, depth) for tag in tags)
        first = " | ".join(self._tag(tag, depth + 1) for tag in tags) if node.get("at_least_one") else ""
        if node.get("stop_after_first"):
            return first or f"({triggered}) | TAG_TEXT"
        return f"({first}) ({triggered})* TAG_TEXT" if first else f"({triggered})* TAG_TEXT"

    def _triggered(self, tag: Node, triggers: Sequence[Any], depth: int) -> str:
        begin = _text(tag, "begin")
        trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequestError(f"the tag {begin[:100]!r} starts with none of the triggers")
        token = None if self._special is None else self._special.match(begin)
        if token is not None and token.end() > len(trigger):  # a token is there as a whole
            trigger = token[0]
        return f"{self._until(trigger)} {self._literal(begin.removeprefix(trigger))} {self._rest(tag, depth + 1)}"

    def _tags_with_separator(self, node: Node, depth: int) -> str:
        tags = " | ".join(f"({self._tag(tag, depth + 1)})" for tag in _tags(node))
        more = "" if node.get("stop_after_first") else f" ({self._literal(_text(node, 'separator'))} ({tags}))*"
        return f"({tags}){more}" if node.get("at_least_one") else f"(({tags}){more})?"

    def _until(self, text: str) -> str:
        """Free text that ends with ``text``."""
        if not text:
            return "TAG_TEXT"
        token = None if self._special is None else self._special.search(text)
        if token is not None and token.start() == 0:
            return f"TAG_TEXT {token[0]} {self._literal(text[token.end() :])}"
        if token is not None:  # the free text then has no other text that begins so
            return f"{self._until(text[: token.start()])} {self._literal(text[token.start() :])}"
        name = f"until_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: TAG_TEXT {json.dumps(text, ensure_ascii=False)}")
        return name

    def _literal(self, text: str) -> str:
        if not text:
            return '""'
        if self._special is None:
            return json.dumps(text, ensure_ascii=False)
        pieces = re.split(f"({self._special.pattern})", text)
        return " ".join(
            piece if index % 2 else json.dumps(piece, ensure_ascii=False) for index, piece in enumerate(pieces) if piece
        )


def _kind(node: Any) -> Any:
    return node.get("type") if isinstance(node, dict) else None


def _text(node: Node, name: str) -> str:
    value = node.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"a format of the type {node.get('type', 'tag')!r:.100} needs the string {name!r}")
    return value


def _list(node: Node, name: str) -> list[Any]:
    value = node.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"a format of the type {node.get('type')!r:.100} needs the list {name!r}, not empty")
    return value


def _tags(node: Node) -> list[Node]:
    tags = _list(node, "tags")
    if not all(isinstance(tag, dict) for tag in tags):
        raise InvalidRequestError(f"the tags of a format of the type {node.get('type')!r:.100} must be objects")
    return tags


def _json(node: Node) -> str:
    schema = node.get("json_schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError("a format of the type 'json_schema' needs the object 'json_schema'")
    JsonSchema(schema).check()
    options = schema.get("x-guidance")
    given = options if isinstance(options, dict) else {}
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITESPACE} | given})}"


def _regex(node: Node) -> str:
    pattern = _text(node, "pattern")
    escaped = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
    return f"/{escaped}/".replace("\n", r"\n")
