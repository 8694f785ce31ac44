"""The input of a custom tool is decoded from the JSON of its call, wherever the JSON is cut."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, strategies as st

from lightserve.httpserver.chat.custom_input import CustomToolInput
from test.cpu_time import growth
from test.text.parsing.corpus import cut


def decode(*pieces: str) -> tuple[list[str], str]:
    """The deltas of the pieces, and the whole input."""
    found = CustomToolInput()
    deltas = [found.push(piece) for piece in pieces]
    deltas.append(found.finish("".join(pieces)))
    return deltas, "".join(deltas)


@given(
    text=st.text(),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    more=st.sampled_from([{}, {"other": "x"}]),
    seed=st.integers(0, 2**32),
)
def test_any_text_survives_any_cut(
    text: str, ensure_ascii: bool, indent: int | None, more: dict[str, str], seed: int
) -> None:
    arguments = json.dumps({"input": text, **more}, ensure_ascii=ensure_ascii, indent=indent)

    _, whole = decode(*cut(arguments, random.Random(seed)))

    assert whole == text


def test_text_is_decoded_while_it_arrives() -> None:
    deltas, _ = decode('{"input', '": "*** Begin', " Patch\\", "n+a", "\\ud83d", '\\ude42"', "}")

    assert deltas == ["", "*** Begin", " Patch", "\n+a", "", "🙂", "", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "a\\nb"}', "a\nb"),
        ('{"first": 1, "input": "x"}', "x"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('"just text"', '"just text"'),
        ("not JSON", "not JSON"),
        ("", ""),
        ('{"input": "C:\\dir \\n"}', "C:\\dir \n"),
        ('{"input": "lone \\ud83d half"}', "lone \ufffd half"),
        ('{"input": "cut in an escape \\', "cut in an escape "),
        ('{"input": "cut', "cut"),
    ],
)
def test_what_the_model_writes_otherwise_is_kept(arguments: str, text: str) -> None:
    assert decode(arguments)[1] == text
    assert decode(*arguments)[1] == text


@pytest.mark.parametrize("begin", ['{"input": "', '{"other": "'])
def test_the_time_is_linear(begin: str) -> None:
    def work(length: int) -> None:
        found = CustomToolInput()
        found.push(begin)
        for _ in range(length):
            found.push("word ")
        found.finish("")

    assert growth(work, 100_000) < 8
