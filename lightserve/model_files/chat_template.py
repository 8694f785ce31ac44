"""Chat templates: Jinja from a model's files, so it runs in a sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple

from jinja2 import TemplateError, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightserve.errors import InvalidRequestError
from lightserve.model_files.special_tokens import SpecialTokens

RENDER_LIMIT_S = 10.0  # a thousand messages take milliseconds
MAX_LENGTH = 2**26  # characters of a prompt: more than any request body, unless the template multiplies it
MAX_MESSAGE_LENGTH = 500  # of an error: it may quote the messages
# the names that every template can use; a request's variables must not replace them
RESERVED_NAMES = frozenset(
    {
        "raise_exception",
        "strftime_now",
        *DEFAULT_NAMESPACE,
        *(f"{role}_token" for role in SpecialTokens._fields),
    }
)


# what a chat may offer to a template: some templates are only for chats with tools or documents
NOTHING: dict[str, Any] = {"tools": None, "documents": None}
TOOL_AND_DOCUMENT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}],
    "documents": [{"title": "a", "text": "b"}],
}


class SystemRules(NamedTuple):
    """Where a template keeps system messages; elsewhere it refuses or drops them."""

    takes_system: bool  # at the start
    takes_several: bool  # more than one at the start
    takes_late: bool  # after other messages
    takes_users_in_a_row: bool  # two messages of the user in sequence


class ChatTemplate:
    def __init__(self, text: str, special: SpecialTokens) -> None:
        self._text = text
        self._tokens = {f"{role}_token": token for role, token in special._asdict().items() if token is not None}
        self._template = _environment().from_string(text)

    def render(self, **variables: Any) -> str:
        try:
            return "".join(_within_limits(self._template.generate(**{**self._tokens, **variables})))
        except TemplateError as error:  # includes raise_exception, with which templates check roles
            raise _template_error("rejects", error) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _template_error("cannot render", error) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self._text)))

    @cached_property
    def system_rules(self) -> SystemRules:
        """Found by rendering short chats; it takes about a millisecond."""
        keeps = next(
            (partial(self._keeps, one) for one in (NOTHING, TOOL_AND_DOCUMENT) if self._keeps(one, "user")), None
        )
        if keeps is None:  # it does not render a plain chat, which says nothing about system messages
            return SystemRules(True, True, True, True)
        return SystemRules(
            takes_system=keeps("system", "user"),
            takes_several=keeps("system", "system", "user"),
            takes_late=keeps("system", "user", "assistant", "system", "user"),
            takes_users_in_a_row=keeps("user", "user", "assistant", "user", "user"),
        )

    def _keeps(self, offered: Mapping[str, Any], *roles: str) -> bool:
        """Whether the prompt for messages of these roles contains all of them."""
        texts = [f"[message {i} of a test]" for i in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            prompt = self.render(messages=messages, **offered, add_generation_prompt=True)
        except InvalidRequestError:
            return False
        return all(text in prompt for text in texts)


def _within_limits(pieces: Iterable[str]) -> Iterator[str]:
    """Check time and length whenever the template writes text. A loop that writes nothing is not detected."""
    end_s, length = time.monotonic() + RENDER_LIMIT_S, 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_LENGTH:
            raise InvalidRequestError(f"the rendered chat template is longer than {MAX_LENGTH:,} characters")
        if time.monotonic() > end_s:
            raise InvalidRequestError(f"rendering the chat template took longer than {RENDER_LIMIT_S:.0f} s")
        yield piece


def _template_error(verb: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the model's chat template {verb} these messages: {str(error)[:MAX_MESSAGE_LENGTH]}")


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that templates written for transformers expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], finalize=_none_as_empty
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _none_as_empty(value: Any) -> Any:
    """A message without content adds no text, not the word None."""
    return "" if value is None else value


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training. Here its content is plain text."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
