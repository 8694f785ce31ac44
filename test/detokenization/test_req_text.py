"""The text of one request: hidden characters at its start, and stop strings after them."""

from __future__ import annotations

import pytest

from lightserve.detokenization.req_text import ReqText
from lightserve.messages.params import FinishReason, TextParams
from test.real_model import smollm2_tokenizer


def text_of(text: str, hidden: int, *stop: str, cut: int = 0) -> list[str]:
    """The text returned for each token; the last ``cut`` tokens are left out."""
    tokenizer = smollm2_tokenizer()
    shown = ReqText(tokenizer.decoder, TextParams(stop=stop, hidden_chars=hidden))
    *ids, last = tokenizer.encode(text)[: -cut or None]
    return [*(shown.push(token_id, None) for token_id in ids), shown.push(last, FinishReason.LENGTH)]


@pytest.mark.parametrize("text", ["Hello world, how are you?", "日本語と😀の文", "a", "  \n\t  x"])
def test_the_first_characters_are_hidden_whatever_the_token_boundaries(text: str) -> None:
    for hidden in range(len(text) + 2):
        assert "".join(text_of(text, hidden)) == text[hidden:]


def test_a_stop_string_counts_only_after_the_hidden_characters() -> None:
    assert "".join(text_of("stop here and stop there", 4, "stop")) == " here and "
    assert "".join(text_of("stop here", 2, "stop")) == "op here"


def test_a_text_that_ends_inside_the_hidden_characters_is_empty() -> None:
    assert "".join(text_of("😀😀", 2, cut=1)) == ""
