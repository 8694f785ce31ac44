"""Which chat template a chat uses, and what a template keeps of system messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files import Tokenizer, load_tokenizer, resolve
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from test.small_text import small_backend

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
DOCUMENTS = [{"title": "a", "text": "b"}]
NAMED = {"default": "plain", "tool_use": "tools {{ tools | length }}", "rag": "rag {{ documents[0].title }}"}


def tokenizer(template: str | dict[str, str] | None) -> Tokenizer:
    return Tokenizer(small_backend(), SpecialTokens(), template)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(small_backend().to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "from the config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("templates", "fields", "expected"),
    [
        (NAMED, {}, "plain"),
        (NAMED, {"tools": []}, "plain"),
        (NAMED, {"tools": TOOLS}, "tools 1"),
        (NAMED, {"documents": DOCUMENTS}, "rag a"),
        (NAMED, {"tools": TOOLS, "documents": DOCUMENTS}, "tools 1"),
        ({"default": "plain"}, {"tools": TOOLS, "documents": DOCUMENTS}, "plain"),
        ({"tool_use": "only one"}, {}, "only one"),
        ("{{ documents is none }} {{ tools is none }}", {}, "True True"),
    ],
)
def test_tools_and_documents_choose_a_named_template(
    templates: str | dict[str, str], fields: dict[str, Any], expected: str
) -> None:
    assert tokenizer(templates).apply_chat_template(USER, **fields) == expected


def test_the_text_of_all_templates_shows_what_the_model_may_write() -> None:
    found = tokenizer(NAMED)

    assert found.chat_template == "plain"
    assert all(text in found.chat_template_text for text in NAMED.values())
    assert tokenizer(None).chat_template_text == ""


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_named_templates_are_used_as_in_transformers(folder: Path, tools: list[dict[str, Any]] | None) -> None:
    (folder / "chat_template.jinja").write_text("default {{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(USER, tools=tools, tokenize=False)

    assert load_tokenizer(resolve(str(folder), needs_weights=False)).apply_chat_template(USER, tools=tools) == theirs


@pytest.mark.parametrize("is_file", [True, False])
def test_a_given_template_replaces_those_of_the_model(folder: Path, tmp_path: Path, is_file: bool) -> None:
    given = "{{ messages[0].content }}!"
    if is_file:
        (tmp_path / "mine.jinja").write_text(given)
        given = str(tmp_path / "mine.jinja")

    found = load_tokenizer(resolve(str(folder), needs_weights=False), given)

    assert found.apply_chat_template(USER, tools=TOOLS) == "Hi!"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("missing.jinja", "--chat_template missing.jinja: no such file; give the path of a Jinja file"),
        ("x" * 5000, "no such file"),
        ("{% if %}", "--chat_template: the chat template is not valid Jinja"),
    ],
)
def test_a_given_template_that_cannot_be_used_is_refused(folder: Path, given: str, reason: str) -> None:
    with pytest.raises(ModelFilesError, match=reason):
        load_tokenizer(resolve(str(folder), needs_weights=False), given)


def test_a_chat_without_any_template_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer({}).apply_chat_template(USER)


PARTS_ONLY = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %};{% endfor %}"
)


def test_a_template_that_shows_only_parts_gets_plain_text_as_a_part() -> None:
    """As that of SmolVLM, which goes through the characters of a text and shows none of them."""
    messages: list[dict[str, Any]] = [
        *USER,
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    ]

    assert tokenizer(PARTS_ONLY).apply_chat_template(messages) == "Hi;<image>What?;"


def test_other_templates_get_plain_text_as_it_is() -> None:
    template = "{{ messages[0].content is string }} {{ messages[0].content }}"

    assert tokenizer(template).apply_chat_template(USER) == "True Hi"
