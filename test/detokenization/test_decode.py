"""Pieces of text add up to the text, and no piece is half a character."""

from __future__ import annotations

import random

import pytest

from lightserve.detokenization.decode import REPLACEMENT, TextStream
from lightserve.model_files.tokenizer import Tokenizer, load_tokenizer
from test.real_model import smollm2

TEXTS = [
    "Hello, world!",
    "日本の首都は東京です。",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "naïve café\n\n\tdef f(x):\n        return x",
    "a" * 50 + "   " * 20,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2())


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_add_up_without_half_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer.decode)

    pieces = [stream.push(token) for token in tokenizer.encode(text)] + [stream.flush()]

    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_random_ids_add_up_to_the_text_of_all(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size if rng.random() < 0.5 else 300) for _ in range(40)]
    stream = TextStream(tokenizer.decode)

    pieces = [stream.push(token) for token in ids] + [stream.flush()]

    assert "".join(pieces) == tokenizer.decode(ids)


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("😀")[:1]
    stream = TextStream(tokenizer.decode)

    assert stream.push(half[0]) == ""
    assert stream.flush() == tokenizer.decode(half)
