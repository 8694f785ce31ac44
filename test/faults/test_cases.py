"""All fault cases. ``make chaos`` runs them too and prints a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from test.faults.case import Case
from test.faults.cases import (
    ADAPTER_CASES,
    CASES,
    CORE,
    DISAGGREGATION_CASES,
    DRAFT_CASES,
    GROUP_CASES,
    STAGE_CASES,
    START_CASES,
    STATE_CASES,
    TIER_CASES,
    WEIGHT_CASES,
    adapters,
    disaggregation,
    drafts,
    groups,
    kv_tiers,
    stages,
    states,
    weights,
)
from test.faults.server_pool import ServerPool
from test.faults.start_case import StartCase

SEED = 1
SLACK = 6.0  # other tests run at the same time, unlike in `make chaos`


def param(case: Case | StartCase) -> ParameterSet:
    return pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.is_long else [pytest.mark.slow])


@pytest.fixture(scope="module")
def pool() -> Iterator[ServerPool]:
    with ServerPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def model_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """Servers with a tiny model, whose context is long enough for responses that a fault can interrupt."""
    from test.small_text import save_small_model  # here, because it imports transformers

    folder = Path(save_small_model(tmp_path_factory.mktemp("model")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    with ServerPool(("--model_dir", str(folder), "--deterministic")) as pool:
        yield pool


@pytest.fixture(scope="module")
def stage_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(stages.worker_flags(tmp_path_factory.mktemp("stages"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def group_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(groups.worker_flags(tmp_path_factory.mktemp("groups"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def state_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(states.worker_flags(tmp_path_factory.mktemp("states"))) as pool:
        yield pool


@pytest.fixture(scope="module", params=drafts.DRAFTERS)
def draft_server_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(drafts.worker_flags(tmp_path_factory.mktemp("drafts"), request.param)) as pool:
        yield pool


@pytest.fixture(scope="module")
def adapter_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(adapters.worker_flags(tmp_path_factory.mktemp("adapters"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def weight_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(weights.worker_flags(tmp_path_factory.mktemp("weights"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def tier_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(kv_tiers.worker_flags(tmp_path_factory.mktemp("tiers"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def disaggregated_server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    with ServerPool(disaggregation.worker_flags(tmp_path_factory.mktemp("split"))) as pool:
        yield pool


@pytest.mark.parametrize("case", [param(case) for case in CASES])
def test_a_fault_causes_its_reaction_and_leaves_nothing_behind(pool: ServerPool, case: Case) -> None:
    case.run(pool, SEED, SLACK)


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CORE])
def test_a_fault_causes_its_reaction_with_a_model_too(model_server_pool: ServerPool, case: Case) -> None:
    case.run(model_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in ADAPTER_CASES])
def test_a_fault_of_adapters_causes_its_reaction(adapter_server_pool: ServerPool, case: Case) -> None:
    case.run(adapter_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in WEIGHT_CASES])
def test_a_fault_of_a_weight_update_causes_its_reaction(weight_server_pool: ServerPool, case: Case) -> None:
    case.run(weight_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in TIER_CASES])
def test_a_fault_of_kv_tiers_causes_its_reaction(tier_server_pool: ServerPool, case: Case) -> None:
    case.run(tier_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in DISAGGREGATION_CASES])
def test_a_fault_of_prefill_and_decode_engines_causes_its_reaction(
    disaggregated_server_pool: ServerPool, case: Case
) -> None:
    case.run(disaggregated_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in STAGE_CASES])
def test_a_fault_of_a_pipeline_stage_causes_its_reaction(stage_server_pool: ServerPool, case: Case) -> None:
    case.run(stage_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in GROUP_CASES])
def test_a_fault_of_an_attention_group_causes_its_reaction(group_server_pool: ServerPool, case: Case) -> None:
    case.run(group_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in STATE_CASES])
def test_a_fault_beside_recurrent_states_causes_its_reaction(state_server_pool: ServerPool, case: Case) -> None:
    case.run(state_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in DRAFT_CASES])
def test_a_fault_beside_drafts_causes_its_reaction(draft_server_pool: ServerPool, case: Case) -> None:
    case.run(draft_server_pool, SEED, SLACK)


@pytest.mark.parametrize("case", [param(case) for case in START_CASES])
def test_a_faulty_start_causes_its_reaction_and_leaves_nothing_behind(case: StartCase) -> None:
    case.run(SLACK)
