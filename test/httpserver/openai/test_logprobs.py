"""Tokens as strings and bytes, and where they begin in the text."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from lightserve.httpserver.openai import logprobs
from lightserve.httpserver.openai.logprobs import CompletionLogprobs, chat_logprobs, concatenated
from lightserve.messages.output import StrOut
from lightserve.messages.step import Token
from test.real_model import smollm2_tokenizer as smol

TEXTS = ["Hello world", "naïve 日本語 😀👩‍👩‍👧", "  a\n\tb ", "\u0000\x7f\xa0\xad"]


def outs(ids: list[int], k: int = 0) -> list[StrOut]:
    return [
        StrOut(0, "", Token(token_id, logprob=-0.5, top_logprobs=[(5 + j, -1.0) for j in range(k)])) for token_id in ids
    ]


def chat_entry(out: StrOut, k: int) -> Any:
    return orjson.loads(orjson.dumps(chat_logprobs(smol(), k)(out)["content"][0]))


def test_part_of_a_character_is_escaped_as_openai_does() -> None:
    ids = smol().encode("👩", add_special_tokens=False)
    assert len(ids) > 1

    entry = chat_entry(outs(ids)[0], 0)
    tokens = CompletionLogprobs(smol(), 0, skips_special=True)(outs(ids)[0])["tokens"]

    assert entry["token"].startswith("\\xf0")
    assert entry["bytes"][0] == 0xF0
    assert tokens == ["bytes:" + entry["token"]]


@given(st.lists(st.sampled_from([*TEXTS, "👍", "é"]), max_size=4).map("".join))
def test_the_offset_of_a_token_is_the_length_of_the_text_before_it(text: str) -> None:
    ids = smol().encode(text, add_special_tokens=False)
    logprobs_of = CompletionLogprobs(smol(), 0, skips_special=True)

    offsets = [logprobs_of(out)["text_offset"][0] for out in outs(ids)]

    before = [b"".join(smol().decoder.token_bytes(token_id) for token_id in ids[:i]) for i in range(len(ids))]
    assert offsets == [len(data.decode(errors="ignore")) for data in before]


def test_kept_json_of_tokens_is_bounded_and_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CACHED_TOKENS", 2)
    made: list[int] = []

    def text_of(token_id: int) -> str:
        made.append(token_id)
        return str(token_id)

    texts = logprobs._OfTokens(text_of)

    assert [texts[i] for i in (1, 1, 2, 3, 3, 1)] == ["1", "1", "2", "3", "3", "1"]
    assert made == [1, 2, 3, 1]
    assert len(texts) == 2


def test_a_token_that_is_not_shown_does_not_move_the_offset() -> None:
    ids = [*smol().encode("ab"), 2, *smol().encode("c")]

    skipping = CompletionLogprobs(smol(), 0, skips_special=True)
    showing = CompletionLogprobs(smol(), 0, skips_special=False)

    assert [skipping(out)["text_offset"][0] for out in outs(ids)][-2:] == [2, 2]
    assert [showing(out)["text_offset"][0] for out in outs(ids)][-2:] == [2, 2 + len("<|im_end|>")]


def test_alternatives_are_limited_to_top_logprobs_and_completions_add_the_sampled_token() -> None:
    out = outs([smol().encode("Hi")[0]], k=5)[0]

    chat = chat_entry(out, 2)
    completion = CompletionLogprobs(smol(), 2, skips_special=True)(out)

    assert len(chat["top_logprobs"]) == 2
    assert len(completion["top_logprobs"][0]) == 3
    assert completion["top_logprobs"][0]["Hi"] == -0.5


def test_the_logprob_of_an_impossible_token_is_a_json_number() -> None:
    out = StrOut(0, "", Token(100, logprob=-math.inf, top_logprobs=[(101, -math.inf)]))

    entry = chat_entry(out, 1)
    completion = CompletionLogprobs(smol(), 1, skips_special=True)(out)

    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    assert completion["token_logprobs"] == [-9999.0]


def test_concatenating_logprobs_changes_no_input() -> None:
    parts: list[dict[str, Any]] = [{"content": [1], "refusal": None}, {"content": [2], "refusal": None}]

    assert concatenated(parts) == {"content": [1, 2], "refusal": None}
    assert parts[0] == {"content": [1], "refusal": None}
    assert concatenated([]) is None
