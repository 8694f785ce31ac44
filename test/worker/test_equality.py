"""The text is the one without drafts: every option of a request, with every drafter, greedily and with a seed.

N-grams and EAGLE-3 heads have these tests in test_ngram.py and test_eagle3.py; several ranks in test/api.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightserve.offline.llm import LLM
from test.small_text import save_small_model, small_backend
from test.worker.test_draft_model import config_of as draft_model_config, save_draft_model
from test.worker.test_mtp import MTP, save_model as save_mtp_model
from test.worker.test_mtp_formats import Mtp
from test.worker.test_ngram import (
    CONFIG,
    DRAFTED,
    GREEDY,
    SEEDED,
    TOKEN_BY_TOKEN,
    assert_same,
    params_of,
    prompts_of,
    without_costs,
)

VOCAB = 40  # tokens of prompts: all models have them
OPTIONS = DRAFTED | TOKEN_BY_TOKEN
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED | {"temperature": 1.0}}


class Pair(NamedTuple):
    drafting: LLM
    plain: LLM


def save_suffix(folder: Path) -> tuple[str, str]:
    return save_small_model(folder), CONFIG.replace("ngram", "suffix", 1)


def save_mtp(folder: Path) -> tuple[str, str]:
    save_mtp_model(folder, "glm4_moe")
    small_backend().save(str(folder / "tokenizer.json"))
    return str(folder), MTP


def save_mtp_of_recurrent_layers(folder: Path) -> tuple[str, str]:
    Mtp("qwen3_next").save(folder)
    small_backend().save(str(folder / "tokenizer.json"))
    return str(folder), MTP


def save_smaller_model(folder: Path) -> tuple[str, str]:
    smaller = save_draft_model(folder / "smaller", "qwen3", 100)
    return save_small_model(folder / "model"), draft_model_config(smaller)


SAVERS: list[Callable[[Path], tuple[str, str]]] = [
    save_suffix,
    save_mtp,
    save_mtp_of_recurrent_layers,
    save_smaller_model,
]


def make(folder: str, config: str | None) -> LLM:
    llm = LLM(
        folder,
        device="cpu",
        data_type="float32",
        speculative_config=config,
        max_total_token_num=3000,
        running_max_req_size=16,
    )
    if config is not None:
        without_costs(llm)
    return llm


@pytest.fixture(scope="module", params=SAVERS, ids=lambda save: save.__name__.removeprefix("save_"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, config = request.param(tmp_path_factory.mktemp("model"))
    return Pair(make(folder, config), make(folder, None))


def repeating_prompts(count: int, seed: int) -> list[list[int]]:
    return [[token % VOCAB for token in prompt] for prompt in prompts_of(count, seed)]


def test_random_options_never_change_a_text(pair: Pair, pytestconfig: pytest.Config) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    count = 60 if pytestconfig.getoption("--long") else 5
    params = [
        params_of(rng.choice(list(SAMPLINGS.values())), {"seed": rng.randrange(99)}, *chosen)
        for chosen in (rng.choices(list(OPTIONS.values()), k=2) for _ in range(count))
    ]
    prompts = repeating_prompts(len(params), seed)

    drafted = pair.drafting.generate(prompts, params)

    try:
        assert_same(drafted, pair.plain.generate(prompts, params))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error
    assert pair.drafting._scheduler.only_group.pool.used == 0


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("options", OPTIONS)
def test_no_option_changes_a_text(pair: Pair, options: str, sampling: str) -> None:
    params: dict[str, Any] = SAMPLINGS[sampling] | OPTIONS[options]
    prompts = repeating_prompts(3, seed=len(options))

    drafted = pair.drafting.generate(prompts, params_of(params))

    assert_same(drafted, pair.plain.generate(prompts, params_of(params)))
    assert options not in TOKEN_BY_TOKEN or all(one.drafts is None for one in drafted)
