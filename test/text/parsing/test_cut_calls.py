"""Outputs that max_tokens or a stop string cuts off: no part of a call is shown as content."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lightserve.text.parsing import OutputParser, merge_deltas
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.tool_calls.base import ToolFormat
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME
from lightserve.text.parsing.tool_grammar import enforceable_format
from test.text.parsing.corpus import CORPUS, TOOLS, Sample, cut
from test.text.parsing.test_tool_grammar import TWO_CALLS

# outputs in which calls have no first marker: the beginning of one may be an answer
WHOLE_OUTPUT = {"llama3_json", "pythonic", "xlam"}


def is_certain(name: str, text: str) -> bool:
    """Whether a call begins with a marker that no other text has."""
    begins = TOOL_FORMATS_BY_NAME[name].call_begins
    return "```" not in text and (not begins or begins[0] in text)


# outputs with calls
CALLED = [
    (name, sample)
    for name, samples in CORPUS.items()
    for sample in samples
    if sample.calls and name not in WHOLE_OUTPUT and is_certain(name, sample.text)
]


def content_of(tool_format: ToolFormat, pieces: Sequence[str], only_calls: bool = False) -> str:
    """Of an output that was cut off."""
    parser = OutputParser(tool_format.parse, DeltaWriter(TOOLS, only_calls=only_calls))
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return merge_deltas([*deltas, *parser.finish(is_cut=True)]).content


def without_begun_marker(content: str, tool_format: ToolFormat) -> str:
    """A text may end like the beginning of a marker: it is shown."""
    markers = (*tool_format.markers, *tool_format.call_begins, "to=")  # the last one begins a header of Harmony
    begins = {marker[:count] for marker in markers for count in range(1, len(marker))}
    ends = [begin for begin in begins if content.endswith(begin)]
    return content.removesuffix(max(ends, key=len, default="")).rstrip()


@pytest.mark.parametrize(("name", "sample"), CALLED, ids=lambda value: str(value)[:40])
def test_no_part_of_a_call_is_content_wherever_an_output_is_cut_off(name: str, sample: Sample) -> None:
    tool_format = TOOL_FORMATS_BY_NAME[name]

    for at in range(len(sample.text)):
        content = content_of(tool_format, [sample.text[:at]])
        assert sample.content.startswith(without_begun_marker(content, tool_format)), sample.text[:at]


@pytest.mark.parametrize("name", sorted(TWO_CALLS))
def test_a_forced_call_that_is_cut_off_has_no_content(name: str) -> None:
    tool_format = enforceable_format(TOOL_FORMATS_BY_NAME[name])

    for at in range(len(TWO_CALLS[name])):
        assert content_of(tool_format, [TWO_CALLS[name][:at]], only_calls=True) == ""


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_a_cut_output_gives_the_same_content_streamed_and_whole(name: str) -> None:
    tool_format, rng = TOOL_FORMATS_BY_NAME[name], random.Random(name)

    for sample in CORPUS[name]:
        for _ in range(10):
            text = sample.text[: rng.randrange(len(sample.text) + 1)]
            assert content_of(tool_format, cut(text, rng)) == content_of(tool_format, [text]), text


def test_text_that_is_no_call_is_never_dropped() -> None:
    hermes = TOOL_FORMATS_BY_NAME["hermes"]

    for text in ("a < b", "Use <tool_call> tags", "<tool_call>now()</tool_call>", "see ```json"):
        assert content_of(hermes, [text]) == text


def test_the_example_of_a_name_that_is_cut_off() -> None:
    text = 'Well. <tool_call>\n{"name": "magic_fu'

    assert content_of(TOOL_FORMATS_BY_NAME["hermes"], [text]) == "Well."
