"""Streamed text equals text decoded at once, stop strings end it according to their definition, and parsers find the
same parts wherever the text is split."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, strategies as st

from lightserve.detokenization.req_text import ReqText, StopMatcher
from lightserve.messages.params import FinishReason, TextParams
from lightserve.model_files import Tokenizer
from lightserve.text.parsing import Output, OutputParser, merge_deltas
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.reasoning import THINK, ReasoningParser
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME
from test.fuzz.profile import FUZZ
from test.real_model import smollm2_tokenizer
from test.small_text import small_tokenizer
from test.text.parsing.corpus import CORPUS, TOOLS, cut

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


def parse(name: str, is_reasoning: bool, pieces: Sequence[str]) -> Output:
    """Parse an output of a format, inside its reasoning or after it."""
    tool_format = TOOL_FORMATS_BY_NAME[name]
    writer = DeltaWriter(TOOLS, lambda: "id")
    reasoning = ReasoningParser(THINK, is_reasoning, tool_format.parse, tool_format.call_begins)
    parser = OutputParser(reasoning.parse, writer)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return merge_deltas([*deltas, *parser.finish()])


FRAGMENTS = sorted({marker for one in TOOL_FORMATS_BY_NAME.values() for marker in (*one.markers, *one.call_begins)})
SAMPLES = sorted({sample.text for samples in CORPUS.values() for sample in samples})


@FUZZ
@given(
    name=st.sampled_from(sorted(CORPUS)),
    is_reasoning=st.booleans(),
    parts=st.lists(
        st.one_of(
            st.sampled_from(["</think>", "<think>", "\n", "{"]),
            st.sampled_from(FRAGMENTS),
            st.sampled_from(SAMPLES),
            texts,
        ),
        max_size=5,
    ),
    seed=st.integers(0, 2**32),
)
def test_the_parts_of_an_output_do_not_depend_on_where_its_text_is_split(
    name: str, is_reasoning: bool, parts: list[str], seed: int
) -> None:
    text = "".join(parts)

    whole = parse(name, is_reasoning, [text])

    assert parse(name, is_reasoning, cut(text, random.Random(seed))) == whole
    assert parse(name, is_reasoning, list(text)) == whole
