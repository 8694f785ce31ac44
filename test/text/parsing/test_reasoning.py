"""Splitting reasoning from the content after it."""

from __future__ import annotations

import random

import pytest

from lightserve.errors import ServerError
from lightserve.text.parsing import Content, OutputParser, Reasoning, merge_deltas
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.parser import parse_content
from lightserve.text.parsing.reasoning import THINK, ReasoningFormat, ReasoningParser, reasoning_format
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME
from test.text.parsing.corpus import HARMONY, TOOLS, channel, cut

R1 = ReasoningFormat("<think>", "</think>", is_implied=True)


def new_parser(is_inside: bool, tools: str = "") -> OutputParser:
    found = TOOL_FORMATS_BY_NAME.get(tools)
    parse, begins = (parse_content, ()) if found is None else (found.parse, found.call_begins)
    return OutputParser(ReasoningParser(THINK, is_inside, parse, begins).parse, DeltaWriter(TOOLS, lambda: "id"))


def split(text: str, is_inside: bool, pieces: list[str] | None = None) -> tuple[str, str]:
    parser = new_parser(is_inside)
    deltas = [delta for piece in pieces or [text] for delta in parser.push(piece)]
    output = merge_deltas([*deltas, *parser.finish()])
    return output.reasoning, output.content


CASES = [
    ("<think>\nWhat is 2+2?\n\n4.\n</think>\n\nIt is 4.\n", False, "What is 2+2?\n\n4.", "It is 4.\n"),
    ("What?\n</think>\nFour", True, "What?", "Four"),
    ("<think>again</think>x", True, "again", "x"),
    ("\n\n<think></think>\nx", False, "", "x"),
    ("No tags. <think>a</think>", False, "", "No tags. <think>a</think>"),
    ("\n plain \n", False, "", "\n plain \n"),
    ("cut off in the mid", True, "cut off in the mid", ""),
    ("<think>a </thin", False, "a </thin", ""),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("a < b </ think> 日本😀 \n </think>ok", True, "a < b </ think> 日本😀", "ok"),
    ("<thi", False, "", "<thi"),
    ("</think>\n\nx</think>", False, "", "x</think>"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "is_inside", "reasoning", "content"), CASES)
def test_reasoning_and_content_do_not_depend_on_where_the_text_is_split(
    text: str, is_inside: bool, reasoning: str, content: str
) -> None:
    rng = random.Random(0)

    assert split(text, is_inside) == (reasoning, content)
    assert split(text, is_inside, list(text)) == (reasoning, content)
    for _ in range(50):
        assert split(text, is_inside, cut(text, rng)) == (reasoning, content)


def test_reasoning_is_streamed() -> None:
    parser = new_parser(is_inside=False)

    assert parser.push("<think>\nLet me") == [Reasoning("Let me")]
    assert parser.writer.is_reasoning
    assert parser.push(" see\n") == [Reasoning(" see")]
    assert parser.push("\n</think>\n") == []
    assert not parser.writer.is_reasoning
    assert parser.push("\nYes") == [Content("Yes")]


@pytest.mark.parametrize(
    ("reasoning_format", "prompt", "is_continued", "expected"),
    [
        (THINK, "<|assistant|>\n<think>\n", False, True),
        (THINK, "<|assistant|>\n", False, False),
        (THINK, "<|assistant|>\n<think>\n\n</think>\n\n", False, False),
        (THINK, "user: what does <think> mean?\nassistant:", False, False),
        (THINK, "assistant: <think>Well, ", True, True),
        (THINK, "assistant: <think>Well</think> so ", True, False),
        (R1, "<|assistant|>\n", False, True),
        (R1, "<|assistant|>\n<think>\n\n</think>\n\n", False, False),
    ],
)
def test_the_prompt_decides_whether_the_output_starts_inside_the_reasoning(
    reasoning_format: ReasoningFormat, prompt: str, is_continued: bool, expected: bool
) -> None:
    assert reasoning_format.begins_inside(prompt, is_continued) is expected


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CALLS = [("now", "{}")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"I could {CALL}, no.</think>\n{CALL}\nok", f"I could {CALL}, no.", "ok", CALLS),
        (f"I could {CALL}, no.</think>", f"I could {CALL}, no.", "", []),
        (f"I must.\n\n{CALL}\n{CALL}", "I must.", "", CALLS * 2),
        (f"I must.\n{CALL}\nDone.", "I must.", "Done.", CALLS),
        (f"A <tool_call> is a tag. So: {CALL}", "A <tool_call> is a tag. So:", "", CALLS),
        ("Hm. <tool_call>", "Hm. <tool_call>", "", []),
        ('Hm. <tool_call>{"name": "now", "arguments": {"a', "Hm.", "", [("now", '{"a')]),
        ('<tool_call>{"arguments": {"a": "' + "x" * 2000, '<tool_call>{"arguments": {"a": "' + "x" * 2000, "", []),
    ],
)
def test_a_call_inside_the_reasoning_is_a_call_only_if_the_reasoning_is_not_closed(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    rng = random.Random(0)
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(50))):
        parser = new_parser(is_inside=True, tools="hermes")

        output = merge_deltas([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])

        assert (output.reasoning, output.content) == (reasoning, content)
        assert [(one.name, one.arguments) for one in output.calls] == calls


def test_reasoning_that_mentions_a_tag_is_streamed() -> None:
    parser = new_parser(is_inside=True, tools="hermes")

    assert parser.push("A <tool_call> tag") == [Reasoning("A <tool_call> tag")]
    assert parser.push(f" or {CALL}") == [Reasoning(" or")]
    assert parser.push(".</think>") == [Reasoning(f" {CALL}.")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (HARMONY[1].text, "Hm.", "Wait."),
        (HARMONY[2].text, "Hm, <b>.", "It is 4."),
        (HARMONY[4].text, "Hm.", "4"),
        (channel("analysis", " Hm.\n", ""), "Hm.", ""),
    ],
)
def test_the_analysis_channel_of_harmony_is_reasoning(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        parser = OutputParser(TOOL_FORMATS_BY_NAME["openai"].parse, DeltaWriter(TOOLS))

        output = merge_deltas([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])

        assert (output.reasoning.strip(), output.content) == (reasoning, content)


def test_the_tags_come_from_the_chat_template_or_from_the_flag() -> None:
    assert reasoning_format("auto", "{{ content.split('</think>')[-1] }}") == THINK
    assert reasoning_format("auto", "[THINK]{{ x }}[/THINK]") == ReasoningFormat("[THINK]", "[/THINK]")
    assert reasoning_format("auto", "{{ messages }}") is None
    assert reasoning_format("none", "</think>") is None
    assert reasoning_format("qwen3", "") == THINK
    assert reasoning_format("deepseek_r1", "") == R1
    assert reasoning_format("<a>,</a>", "") == ReasoningFormat("<a>", "</a>")
    with pytest.raises(
        ServerError, match="unknown --reasoning_parser 'deep'; use one of auto, none, qwen3, deepseek_r1, "
    ):
        reasoning_format("deep", "")
