"""The sample of architectures has every class and every field that all of them have."""

from __future__ import annotations

from test.models.architectures.case import Case
from test.models.architectures.cases import CASES
from test.models.architectures.covering import SAMPLE, covering, features_of


def test_a_case_with_nothing_new_is_left_out() -> None:
    cases = {
        "plain": Case("llama", {"hidden_size": 8}),
        "larger": Case("llama", {"hidden_size": 16}),
        "tied": Case("llama", {"hidden_size": 8, "tie_word_embeddings": True}),
        "untied": Case("llama", {"hidden_size": 8, "tie_word_embeddings": False}),
        "another class": Case("bloom", {"hidden_size": 8}),
    }

    assert covering(cases) == ["tied", "untied", "another class"]


def test_the_sample_is_smaller_and_has_all_features() -> None:
    assert len(SAMPLE) < len(CASES) / 2
    assert set().union(*(features_of(CASES[name]) for name in SAMPLE)) == set().union(*map(features_of, CASES.values()))
