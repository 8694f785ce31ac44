"""Every case; ``make chaos`` runs them too, and prints a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from test.faults.case import Case
from test.faults.cases import CASES, CORE, START_CASES
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


@pytest.fixture(scope="module")
def model_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """With a tiny model, whose answers may be long enough for a fault to meet them."""
    from test.small_text import save_small_model  # transformers begins here

    folder = Path(save_small_model(tmp_path_factory.mktemp("model")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    with Stage(("--model_dir", str(folder), "--deterministic")) as stage:
        yield stage


@pytest.mark.parametrize("case", [param(case) for case in CASES])
def test_a_fault_has_its_reaction_and_leaves_nothing(stage: Stage, case: Case) -> None:
    case.run(stage, SEED, SLACK)


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CORE])
def test_it_does_so_with_a_model_too(model_stage: Stage, case: Case) -> None:
    case.run(model_stage, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in START_CASES])
def test_a_bad_start_has_its_reaction_and_leaves_nothing(case: StartCase) -> None:
    case.run(SLACK)
