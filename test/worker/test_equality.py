"""The text is the one without drafts: every option of a request, with every drafter, greedily and with a seed.

N-grams and EAGLE-3 heads have these tests in test_ngram.py and test_eagle3.py; ranks of --tp in test/api.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test.small_text import save_small_model, small_backend
from test.worker.dflash import HIDDEN, save_drafter
from test.worker.heads import save_head
from test.worker.test_draft_model import config_of as draft_model_config, save_draft_model
from test.worker.test_eagle3 import VOCAB as VOCAB_SIZE
from test.worker.test_heads import Pair
from test.worker.test_mtp import MTP, save_model as save_mtp_model
from test.worker.test_mtp_formats import Mtp
from test.worker.test_ngram import (
    CONFIG,
    DRAFTED,
    GREEDY,
    SEEDED,
    TOKEN_BY_TOKEN,
    assert_same,
    make,
    params_of,
    prompts_of,
)

VOCAB = 40  # tokens of prompts: all models have them
OPTIONS = DRAFTED | TOKEN_BY_TOKEN
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED | {"temperature": 1.0}}


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


def save_for_two_stages(folder: Path) -> tuple[str, str]:
    return save_small_model(folder), CONFIG


def save_mtp_for_two_stages(folder: Path) -> tuple[str, str]:
    return save_mtp(folder)


def save_mtp_of_recurrent_layers_for_two_stages(folder: Path) -> tuple[str, str]:
    return save_mtp_of_recurrent_layers(folder)


def save_recurrent_layers_for_two_stages(folder: Path) -> tuple[str, str]:
    return save_mtp_of_recurrent_layers(folder)[0], CONFIG


def save_smaller_model_for_two_stages(folder: Path) -> tuple[str, str]:
    return save_smaller_model(folder)


def save_eagle3_for_two_stages(folder: Path) -> tuple[str, str]:
    model = save_small_model(folder / "model")
    config = {"method": "eagle3", "model": save_head(folder / "head", VOCAB_SIZE, HIDDEN, [5, 9, 12, 40])}
    return model, json.dumps(config)


def save_dflash_for_two_stages(folder: Path) -> tuple[str, str]:
    return save_dflash(folder)


def save_dflash(folder: Path) -> tuple[str, str]:
    drafter = save_drafter(folder / "drafter", VOCAB_SIZE, HIDDEN, None)
    config = {"method": "dflash", "model": drafter, "num_speculative_tokens": 3}
    return save_small_model(folder / "model"), json.dumps(config)


SAVERS: list[Callable[[Path], tuple[str, str]]] = [
    save_suffix,
    save_mtp,
    save_mtp_of_recurrent_layers,
    save_smaller_model,
    save_dflash,
    save_for_two_stages,
    save_mtp_for_two_stages,
    save_mtp_of_recurrent_layers_for_two_stages,
    save_recurrent_layers_for_two_stages,
    save_smaller_model_for_two_stages,
    save_eagle3_for_two_stages,
    save_dflash_for_two_stages,
]
# only with --long
SELDOM = (
    save_mtp_for_two_stages,
    save_recurrent_layers_for_two_stages,
    save_smaller_model_for_two_stages,
    save_eagle3_for_two_stages,
    save_dflash_for_two_stages,
)
TWO_STAGES = (
    save_for_two_stages,
    save_mtp_for_two_stages,
    save_mtp_of_recurrent_layers_for_two_stages,
    save_recurrent_layers_for_two_stages,
    save_smaller_model_for_two_stages,
    save_eagle3_for_two_stages,
    save_dflash_for_two_stages,
)
RANKS = {save: {"pipeline_parallel_size": 2} for save in TWO_STAGES}
CASES = [pytest.param(save, marks=pytest.mark.long if save in SELDOM else ()) for save in SAVERS]


@pytest.fixture(scope="module", params=CASES, ids=lambda save: save.__name__.removeprefix("save_"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, config = request.param(tmp_path_factory.mktemp("model"))
    with make(folder, config, **RANKS.get(request.param, {})) as drafting:
        yield Pair(drafting, make(folder, None))


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
def test_no_option_changes_a_text(pair: Pair, sampling: str) -> None:
    """All options at once: they share steps, and the matrix takes minutes."""
    names = [name for name in OPTIONS for _ in range(3)]
    params = [params_of(SAMPLINGS[sampling] | OPTIONS[name]) for name in names]
    prompts = repeating_prompts(len(params), seed=len(sampling))

    drafted = pair.drafting.generate(prompts, params)

    for name, generation, expected in zip(names, drafted, pair.plain.generate(prompts, params), strict=True):
        try:
            assert_same([generation], [expected])
        except AssertionError as error:
            raise AssertionError(f"{name}, {sampling}") from error
        assert name not in TOKEN_BY_TOKEN or generation.drafts is None
    assert sum(generation.drafts is not None for generation in drafted) > len(drafted) / 2
