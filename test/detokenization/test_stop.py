from __future__ import annotations

import itertools

import pytest

from lightserve.detokenization.stop import StopMatcher


def splits(text: str) -> list[list[str]]:
    """Every way to cut the text into pieces."""
    cuts = itertools.product([False, True], repeat=len(text) - 1)
    return [
        "".join(c + ("|" if cut else "") for c, cut in itertools.zip_longest(text, mask)).split("|") for mask in cuts
    ]


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("ab<end>cd", ("<end>",), "ab", "<end>"),
        ("aaab", ("aab",), "a", "aab"),
        ("abab", ("abc",), "abab", None),
        ("xyz", ("z", "yz"), "x", "yz"),
        ("abcd", ("abcd", "bc"), "a", "bc"),
        ("hello", (), "hello", None),
        ("a<en", ("<end>",), "a<en", None),
    ],
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: tuple[str, ...], shown: str, matched: str | None
) -> None:
    for pieces in splits(text):
        matcher = StopMatcher(stops)

        out = [matcher.push(piece) for piece in pieces] + [matcher.flush()]

        assert "".join(out) == shown, pieces
        assert matcher.matched == matched
