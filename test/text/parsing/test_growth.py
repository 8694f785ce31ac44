"""Parsing takes linear time: the time a token is the same in a short and in a long output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from lightserve.text.parsing import OutputParser
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.reasoning import THINK, ReasoningParser
from lightserve.text.parsing.tool_calls.formats import TOOL_FORMATS_BY_NAME
from test.cpu_time import cpu_seconds, growth
from test.text.parsing.corpus import CORPUS, TOOLS, call, new_parser, tagged

TOKENS = [" the", " value", ",", " a", "b", " 日本", " of", "ing"]
N_TOKENS = 40_000
MAX_GROWTH = 7.0  # of four times the work: 4 is linear, 16 quadratic; the first version of the parsers had 10


def long_value(name: str, n_tokens: int) -> list[str]:
    """A call with a long argument, in tokens."""
    sample = next(one.text for one in CORPUS[name] if "Paris" in one.text)
    before, _, after = sample.partition("Paris")
    return [before, *tokens(n_tokens), after]


def tokens(count: int) -> list[str]:
    return [TOKENS[i % len(TOKENS)] for i in range(count)]


def parse(parser: OutputParser, pieces: list[str]) -> None:
    for piece in pieces:
        parser.push(piece)
    parser.finish()


def reasoning_parser() -> OutputParser:
    hermes = TOOL_FORMATS_BY_NAME["hermes"]
    parser = ReasoningParser(THINK, True, hermes.parse, hermes.call_begins)
    return OutputParser(parser.parse, DeltaWriter(TOOLS))


def parse_call(name: str, count: int) -> None:
    parse(new_parser(name), long_value(name, count))


OUTPUTS: dict[str, Callable[[int], None]] = {name: partial(parse_call, name) for name in TOOL_FORMATS_BY_NAME} | {
    "content": lambda count: parse(new_parser("hermes"), tokens(count)),
    "white space": lambda count: parse(new_parser("hermes"), ["\n"] * count),
    "partial markers": lambda count: parse(new_parser("hermes"), ["<tool", "_cal"] * (count // 2)),
    "failed calls": lambda count: parse(new_parser("hermes"), ["<tool_call>", '{"name": "', "x"] * (count // 3)),
    "name last": lambda count: parse(new_parser("hermes"), ['<tool_call>{"arguments": {"a": "', *tokens(count)]),
    "JSON answer": lambda count: parse(new_parser("llama3_json"), ['{"a": "', *tokens(count), '"}']),
    "reasoning": lambda count: parse(reasoning_parser(), [*tokens(count), "</think>", *tokens(count)]),
    "call in the reasoning": lambda count: parse(
        reasoning_parser(), [*tokens(count // 2), "<tool_call>", *[tagged(call("now", "{}"))] * (count // 8)]
    ),
    "mentions in the reasoning": lambda count: parse(reasoning_parser(), [" <tool_call>", " is"] * (count // 2)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_long_output_takes_linear_time(name: str) -> None:
    assert growth(OUTPUTS[name], N_TOKENS) < MAX_GROWTH


@pytest.mark.long
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_time_a_token_is_the_same_at_ten_thousand_and_at_160_thousand_tokens(name: str) -> None:
    work = OUTPUTS[name]

    assert cpu_seconds(lambda: work(160_000)) / 16 < 1.2 * cpu_seconds(lambda: work(10_000))
