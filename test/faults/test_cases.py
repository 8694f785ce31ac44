"""Every case; ``make chaos`` runs them too, and prints a table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from test.faults.case import Case
from test.faults.cases import CASES, START_CASES
from test.faults.stage import Stage
from test.faults.start_case import StartCase

SEED = 1
SLACK = 6.0  # other tests run beside these; `make chaos` has none


def param(case: Case | StartCase) -> ParameterSet:
    return pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.is_long else [pytest.mark.slow])


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.mark.parametrize("case", [param(case) for case in CASES])
def test_a_fault_has_its_reaction_and_leaves_nothing(stage: Stage, case: Case) -> None:
    case.run(stage, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in START_CASES])
def test_a_bad_start_has_its_reaction_and_leaves_nothing(case: StartCase) -> None:
    case.run(SLACK)
