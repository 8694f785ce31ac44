"""Chat templates: Jinja that came with a model, so it runs in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightserve.errors import InvalidRequestError
from lightserve.model_files.special_tokens import SpecialTokens


class ChatTemplate:
    def __init__(self, text: str, special: SpecialTokens) -> None:
        self._tokens = {f"{role}_token": token for role, token in special._asdict().items() if token is not None}
        self._template = _environment().from_string(text)

    def render(self, **variables: Any) -> str:
        try:
            return self._template.render(**{**self._tokens, **variables})
        except TemplateError as error:  # raise_exception included: templates check roles with it
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequestError(f"the model's chat template cannot take these messages: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for transformers expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], finalize=_written
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _written(value: Any) -> Any:
    """The content of a message that has none is no text, and not the word None."""
    return "" if value is None else value


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant said for training; here its content is plain text."""

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
    """Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
