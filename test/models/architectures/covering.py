"""Few of many cases with everything that any of them has, for tests that combine architectures with something else.

Every case is compared with transformers in test_architectures.py. Tests of ranks, dtypes or loading take a sample,
and with ``--long`` the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightserve.models.registry import MODELS
from test.models.architectures.case import Case
from test.models.architectures.cases import CASES

Feature = tuple[Any, ...]


def features_of(case: Case) -> set[Feature]:
    """The class that serves it, and each field of its config: its value where there are few, else its type."""
    features: set[Feature] = {("class", MODELS[case.model_type])}
    features.add(("converted", case.convert is not None, case.adapt_oracle is not None))
    for name, value in case.fields.items():
        features.add((name, value if isinstance(value, bool | str | None) else type(value)))
    return features


def covering(cases: Mapping[str, Case]) -> list[str]:
    """As few cases as a greedy choice finds, in their order."""
    missing = set[Feature]().union(*map(features_of, cases.values()))
    chosen = set()
    while missing:
        name = max(cases, key=lambda name: len(features_of(cases[name]) & missing))
        chosen.add(name)
        missing -= features_of(cases[name])
    return [name for name in cases if name in chosen]


SAMPLE = covering(CASES)


def sampled(names: list[str]) -> list[Any]:
    """As parameters of a test: those outside the sample run with ``--long``."""
    return [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in names]
