"""Structural tags with a format: which texts they allow, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.specs import structural_tag_grammar
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from test.real_model import smollm2_tokenizer

TOKENIZER = smollm2_tokenizer()
EOS_ID = TOKENIZER.token_to_id("<|im_end|>") or 0
COMPILER = GrammarCompiler(GrammarVocabulary.of(TOKENIZER, 49152, (EOS_ID,)))

ONE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {"type": "tag", "begin": "<f=x>", "content": {"type": "json_schema", "json_schema": ONE}, "end": "</f>"}
NOTE = {"type": "tag", "begin": "<f=y>", "content": {"type": "any_text"}, "end": ["</f>", "<end/>"]}
TRIGGERED: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, NOTE]}
SEPARATED: dict[str, Any] = {"type": "tags_with_separator", "tags": [CALL, NOTE], "separator": ", "}
YES, NO = {"type": "const_string", "value": "yes"}, {"type": "const_string", "value": "no/no"}


def is_allowed(node: dict[str, Any], text: str) -> bool:
    """Whether the text may be a whole output."""
    matcher = COMPILER.compile(structural_tag_grammar({"type": "structural_tag", "format": node}))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("node", "good", "bad"),
    [
        (YES, ["yes"], ["", "ye", "yes!"]),
        ({"type": "or", "elements": [YES, NO]}, ["yes", "no/no"], ["yesno/no"]),
        (
            {"type": "sequence", "elements": [YES, NO, {"type": "any_text"}]},
            ["yesno/no", "yesno/no a\nb"],
            ["no/noyes"],
        ),
        ({"type": "regex", "pattern": r"a/b\/[0-9]{2}"}, ["a/b/12"], ["a/b/1", "a/b/123"]),
        ({"type": "json_schema", "json_schema": ONE}, ['{"a": 1}'], ['{"a": "b"}', '{"a": 1, "b": 2}', "{}"]),
        (CALL, ['<f=x>{"a": 1}</f>'], ['<f=x>{"a": 1}', "<f=x></f>"]),
        (NOTE, ["<f=y>a < b</f>", "<f=y><end/>"], ["<f=y>a", "<f=y>a</f>b"]),
        ({"type": "optional", "content": YES}, ["", "yes"], ["yesyes"]),
        ({"type": "plus", "content": YES}, ["yes", "yesyesyes"], [""]),
        ({"type": "star", "content": YES}, ["", "yesyes"], ["y"]),
        ({"type": "repeat", "content": YES, "min": 2, "max": 3}, ["yesyes", "yesyesyes"], ["yes", "yesyesyesyes"]),
        (
            TRIGGERED,
            ["", "free text", 'a <f=x>{"a": 1}</f> b <f=y>c</f>', "1 < 2"],
            ["a <f=z>", '<f=x>{"b": 1}</f>', '<f=x>{"a": 1}'],
        ),
        (TRIGGERED | {"at_least_one": True}, ['<f=x>{"a": 1}</f>', "<f=y></f> and more"], ["", "text"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "text", "a <f=y>b</f>"], ["a <f=y>b</f> c"]),
        (
            TRIGGERED | {"at_least_one": True, "stop_after_first": True},
            ["<f=y>b</f>"],
            ["", "a", "a <f=y>b</f>", "<f=y>b</f><f=y>b</f>"],
        ),
        (SEPARATED, ["", "<f=y>a</f>", '<f=y>a</f>, <f=x>{"a": 2}</f>'], ["<f=y>a</f><f=y>b</f>", "a", "<f=y>a</f>, "]),
        (SEPARATED | {"at_least_one": True, "stop_after_first": True}, ["<f=y>a</f>"], ["", "<f=y>a</f>, <f=y>b</f>"]),
    ],
)
def test_formats_allow_their_texts_and_no_others(node: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not is_allowed(node, text)] == []
    assert [text for text in bad if is_allowed(node, text)] == []


def test_a_text_that_is_an_added_token_is_that_token() -> None:
    tag = {"type": "tag", "begin": "<|im_start|>a", "content": {"type": "any_text"}, "end": "!<|endoftext|>"}

    assert is_allowed(tag, "<|im_start|>a text!<|endoftext|>")
    assert not is_allowed(tag, "<|im_start|>b text!<|endoftext|>")
    for trigger in ("<|im_", "<|im_start|>"):
        triggered = TRIGGERED | {"triggers": [trigger], "tags": [tag]}
        assert is_allowed(triggered, "free <|im_start|>a text!<|endoftext|> free")
        assert not is_allowed(triggered, "free <|im_start|>b")


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({}, "must have one of the types const_string"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "found 'qwen_xml_parameter'"),
        ({"type": "const_string"}, "needs the string 'value'"),
        ({"type": "sequence", "elements": []}, "needs the list 'elements'"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, YES]}, "must be its last element"),
        ({"type": "tag", "begin": "a", "content": YES, "end": 5}, "the end of a tag"),
        (TRIGGERED | {"triggers": ["<g"]}, "starts with none of the triggers"),
        (SEPARATED | {"tags": [5]}, "must be objects"),
        ({"type": "repeat", "content": YES, "min": 3, "max": 2}, "min and max of a repeat"),
        ({"type": "json_schema", "json_schema": 5}, "needs the object"),
        ({"type": "regex", "pattern": "("}, "cannot be used"),
        ({"type": "or", "elements": [YES] * 600}, "32 levels and 512 formats"),
    ],
)
def test_wrong_formats_are_refused(node: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(structural_tag_grammar({"format": node}))

    assert problem in str(caught.value)


def test_deep_formats_are_refused() -> None:
    node: dict[str, Any] = YES
    for _ in range(500):
        node = {"type": "optional", "content": node}

    with pytest.raises(InvalidRequestError, match="32 levels"):
        structural_tag_grammar({"format": node})
