"""The text of one request: what its beginning hides, and stop strings after that."""

from __future__ import annotations

import pytest

from lightserve.detokenization.req_text import ReqText
from lightserve.io_struct import FinishReason, TextParams
from test.real_model import smollm2_tokenizer


def text_of(text: str, hidden: int, *stop: str, cut: int = 0) -> list[str]:
    """What is shown of a text, token by token; the last ``cut`` tokens do not come."""
    tokenizer = smollm2_tokenizer()
    shown = ReqText(tokenizer.decoder, TextParams(stop=stop, hidden_chars=hidden))
    *ids, last = tokenizer.encode(text)[: -cut or None]
    return [*(shown.push(token_id, None) for token_id in ids), shown.push(last, FinishReason.LENGTH)]


@pytest.mark.parametrize("text", ["Hello world, how are you?", "日本語と😀の文", "a", "  \n\t  x"])
def test_the_first_characters_are_hidden_wherever_tokens_end(text: str) -> None:
    for hidden in range(len(text) + 2):
        assert "".join(text_of(text, hidden)) == text[hidden:]


def test_a_stop_string_counts_only_after_what_is_hidden() -> None:
    assert "".join(text_of("stop here and stop there", 4, "stop")) == " here and "
    assert "".join(text_of("stop here", 2, "stop")) == "op here"


def test_an_end_within_what_is_hidden_shows_nothing() -> None:
    assert "".join(text_of("😀😀", 2, cut=1)) == ""
