"""Every list and every table of every body has a bound: a million wrong entries would be a million errors to build."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.admin.routes import AbortBody
from lightserve.httpserver.admin.tokenize import (
    CountBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
    TokenizeTgiBody,
)
from lightserve.httpserver.anthropic.request import MessagesBody, PromptBody
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.generate.lightllm.request import LightllmBody
from lightserve.httpserver.generate.tgi.request import TgiBody
from lightserve.httpserver.http.body import MAX_VALUES, Body, validate
from lightserve.httpserver.ollama.request import ChatRequest, GenerateRequest
from lightserve.httpserver.openai.completions_request import CompletionBody
from lightserve.httpserver.openai.responses.request import ResponsesBody

BODIES: list[type[Body]] = [
    AbortBody,
    ChatBody,
    ChatRequest,
    CompletionBody,
    CountBody,
    DetokenizeBody,
    GenerateRequest,
    MessagesBody,
    LightllmBody,
    PromptBody,
    ResponsesBody,
    TgiBody,
    TokenizeChatBody,
    TokenizePromptBody,
    TokenizeTgiBody,
]
# keys without a schema that is checked: serialisation, and metadata for /openapi.json
NOT_CHECKED = {"metadata", "serialization", "json_schema_input_schema"}


def schema_of(body: type[Body]) -> Any:
    body.model_rebuild()  # its schema is made for the first request
    return body.__pydantic_core_schema__


def unbounded(node: Any, path: str = "") -> Iterator[str]:
    """Where pydantic would go through any number of entries, each of which may be an error."""
    if isinstance(node, list | tuple):
        for item in node:
            yield from unbounded(item, path)
    elif isinstance(node, dict):
        kind = node.get("type")
        if kind == "list" and node.get("max_length") is None and not node.get("fail_fast"):
            yield f"{path} is a list without max_length or fail_fast"
        if kind == "dict" and _can_fail(node) and not path.endswith("(checked before)"):
            yield f"{path} is a table without at_most"
        before = "(checked before)" if kind == "function-before" else ""
        for name, child in node.items():
            if name not in NOT_CHECKED:
                yield from unbounded(child, f"{path}.{name}{before}" if name != "fields" else path)


def _can_fail(table: dict[str, Any]) -> bool:
    """Entry by entry."""
    return bool(table.get("values_schema", {"type": "any"})["type"] != "any")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_list_and_every_dict_of_a_body_has_a_limit(body: type[Body]) -> None:
    assert list(unbounded(schema_of(body), body.__name__)) == []


class _Careless(Body):
    names: list[str]
    sizes: dict[str, int]


def test_a_list_without_a_limit_is_found() -> None:
    assert len(list(unbounded(schema_of(_Careless)))) == 2


MESSAGES = [{"role": "user", "content": "x"}]
WRONG = [None] * (MAX_VALUES - 10)
MANY = {str(i): None for i in range(100_000)}
BAD: list[tuple[type[Body], dict[str, Any], str]] = [
    (ChatBody, {"response_format": {"type": "structural_tag", "structures": WRONG}}, "response_format.structures"),
    (ChatBody, {"response_format": {"type": "structural_tag", "triggers": WRONG}}, "response_format.triggers"),
    (ChatBody, {"bad_words": WRONG}, "bad_words"),
    (ChatBody, {"chat_template_kwargs": MANY}, "chat_template_kwargs"),
    (ResponsesBody, {"include": WRONG}, "include"),
    (ResponsesBody, {"input": [{"type": "reasoning", "content": WRONG}]}, "input.0.content"),
    (ResponsesBody, {"metadata": MANY}, "metadata"),
    (ResponsesBody, {"metadata": {"x" * 65: ""}}, "metadata"),
    (ResponsesBody, {"metadata": {"x": "x" * 513}}, "metadata.x"),
    (MessagesBody, {"metadata": MANY}, "metadata"),
    (MessagesBody, {"stop_sequences": WRONG}, "stop_sequences"),
]


@pytest.mark.parametrize(("body", "fields", "param"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_over_a_limit_is_refused_by_name(body: type[Body], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        validate(body, {"messages": MESSAGES, "input": "x", "max_tokens": 1} | fields)

    assert str(refused.value.param).startswith(param)
    assert len(str(refused.value)) < 300
