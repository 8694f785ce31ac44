"""Text ends at the first stop string, however it is split, and only a possible start of one is held back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from lightserve.detokenization.req_text import StopMatcher
from test.cpu_time import growth


def splits(text: str) -> list[list[str]]:
    """Every way to split the text into pieces."""
    cuts = itertools.product([False, True], repeat=len(text) - 1)
    return [
        "".join(c + ("|" if cut else "") for c, cut in itertools.zip_longest(text, mask)).split("|") for mask in cuts
    ]


def run(matcher: StopMatcher, pieces: Sequence[str]) -> str:
    return "".join([*map(matcher.push, pieces), matcher.flush()])


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("ab<end>cd", ("<end>",), "ab", "<end>"),
        ("aaab", ("aab",), "a", "aab"),
        ("abab", ("abc",), "abab", None),
        ("xyz", ("z", "yz"), "x", "yz"),
        ("abcd", ("abcd", "bc"), "a", "bc"),
        ("abcd", ("abce", "bcd"), "a", "bcd"),
        ("aaaa", ("aa", "a"), "", "a"),
        ("xaa", ("aa", "aa"), "x", "aa"),
        ("a]^-b", ("]^-",), "a", "]^-"),
        ("日本語", ("本",), "日", "本"),
        ("hello", (), "hello", None),
        ("a<en", ("<end>",), "a<en", None),
    ],
)
def test_text_ends_before_the_first_stop_string_however_it_is_split(
    text: str, stops: tuple[str, ...], shown: str, matched: str | None
) -> None:
    for pieces in splits(text):
        matcher = StopMatcher(stops)

        assert run(matcher, pieces) == shown, pieces
        assert matcher.matched == matched


def test_include_stop_keeps_the_stop_string_however_the_text_is_split() -> None:
    for pieces in splits("ab<end>cd"):
        matcher = StopMatcher(("<end>",), include_stop=True)

        assert run(matcher, pieces) == "ab<end>", pieces
        assert matcher.matched == "<end>"


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The definition: the shortest prefix of the text that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(found, key=len)
    return None


def possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def random_case(rng: random.Random) -> tuple[list[str], list[str]]:
    stops = ["".join(rng.choices("aab", k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
    pieces = ["".join(rng.choices("aaabc", k=rng.randrange(4))) for _ in range(rng.randrange(10))]
    return pieces, stops


def test_random_texts_match_the_definition_and_are_returned_as_early_as_possible() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        pieces, stops = random_case(rng)
        matcher, shown, seen = StopMatcher(stops), "", ""

        for piece in pieces:
            shown, seen = shown + matcher.push(piece), seen + piece

            if found := first_stop(seen, stops):
                assert (matcher.matched, shown) == (found[1], seen[: found[0] - len(found[1])]), (pieces, stops)
            else:
                assert matcher.matched is None, (pieces, stops)
                assert shown == seen[: len(seen) - possible_start(seen, stops)], (pieces, stops)
        assert matcher.matched or shown + matcher.flush() == seen


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(("b",))

    assert matcher.push("abab") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_without_stop_strings_text_is_returned_unchanged() -> None:
    text = "some text"

    assert StopMatcher(()).push(text) is text


@pytest.mark.parametrize(
    ("stops", "pieces"),
    [
        (["a" * 1_000_000], ["aaaa"] * 100_000),  # held back to the end
        (["a" * 50_000 + "b"], ["aaaa"] * 50_000),  # always nearly there
        (["a" * 1_000_000 + "b"], ["aaaa"] * 50_000 + ["c"] + ["aaaa"] * 50_000),  # all of it let go at once
        ([f"{i}stop" for i in range(64)], ["no stop at all"] * 20_000),
        ([f"stop{i}" for i in range(64)], ["st"] * 20_000),
        (["ab" * i + "c" for i in range(1, 65)], ["ab"] * 20_000),
    ],
    ids=["long", "near", "let go", "many idle", "many begun", "many alike"],
)
def test_no_stop_strings_make_a_long_text_slow(stops: list[str], pieces: list[str]) -> None:
    def match(count: int) -> None:
        run(StopMatcher(stops), pieces[:count])

    assert growth(match, len(pieces)) < 10
