"""Streamed text equals text decoded at once, and stop strings end it according to their definition."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from lightserve.detokenization.req_text import ReqText
from lightserve.detokenization.stop import StopMatcher
from lightserve.io_struct import FinishReason, TextParams
from lightserve.model_files import Tokenizer
from test.fuzz.profile import FUZZ
from test.real_model import smollm2_tokenizer
from test.small_text import small_tokenizer

TOKENIZERS = [small_tokenizer(), smollm2_tokenizer()]
tokenizers = st.sampled_from(TOKENIZERS)
# single bytes first, which need not be characters; ids beyond the vocabulary, of which models have logits, add nothing
ids_lists = st.lists(st.one_of(st.integers(0, 280), st.integers(0, 50_000)), max_size=40)
characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=30)
few_letters = st.text("aab\u0301\0", max_size=30)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The shortest prefix of the text that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(found, key=len)
    return None


def until_stop(text: str, stops: Sequence[str], keeps_stop: bool) -> tuple[str, str | None]:
    found = first_stop(text, stops)
    if found is None:
        return text, None
    end, stop = found
    return text[: end if keeps_stop else end - len(stop)], stop


@FUZZ
@given(tokenizer=tokenizers, ids=ids_lists, skips_special=st.booleans())
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, ids: list[int], skips_special: bool) -> None:
    stream = tokenizer.decoder.stream(skips_special)

    pieces = [*map(stream.push, ids), stream.flush()]

    assert "".join(pieces) == tokenizer.decode(ids, skips_special)
    for piece in pieces:
        piece.encode()


@FUZZ
@given(
    pieces=st.lists(st.one_of(few_letters, texts), max_size=8),
    stops=st.lists(st.one_of(few_letters, texts).filter(bool), max_size=4),
    keeps_stop=st.booleans(),
)
def test_stop_strings_match_their_definition(pieces: list[str], stops: list[str], keeps_stop: bool) -> None:
    matcher = StopMatcher(stops, keeps_stop)

    shown = "".join([*map(matcher.push, pieces), matcher.flush()])

    assert (shown, matcher.matched) == until_stop("".join(pieces), stops, keeps_stop)


@FUZZ
@given(tokenizer=tokenizers, ids=ids_lists.filter(bool), stops=st.lists(few_letters.filter(bool), max_size=3))
def test_tokens_end_at_a_stop_string_with_the_text_before_it(
    tokenizer: Tokenizer, ids: list[int], stops: list[str]
) -> None:
    text = ReqText(tokenizer.decoder, TextParams(stop=tuple(stops)))
    shown, used = "", 0
    for used, token_id in enumerate(ids, 1):
        shown += text.push(token_id, FinishReason.LENGTH if used == len(ids) else None)
        if text.matched_stop is not None:
            break

    assert (shown, text.matched_stop) == until_stop(tokenizer.decode(ids[:used]), stops, keeps_stop=False)
