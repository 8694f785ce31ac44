"""MTP layers and draft models of every kind never change a text, and some of their drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightserve.offline.llm import LLM
from test.small_text import save_small_model
from test.worker.test_draft_model import DRAFT_MODELS, config_of, save_draft_model
from test.worker.test_mtp import LIKELY, LONG, MODELS, MTP, save_model
from test.worker.test_mtp_formats import ALWAYS, NAMES, Mtp
from test.worker.test_ngram import GREEDY, SEEDED, assert_same, make, num_accepted, params_of, prompts_of

Saver = Callable[[Path], tuple[Path, str]]  # returns the folder of the model, and --speculative_config


class Pair(NamedTuple):
    drafting: LLM
    plain: LLM


def save_mtp_behind_the_layers(name: str, folder: Path) -> tuple[Path, str]:
    save_model(folder, name)
    return folder, MTP


def save_mtp_apart(name: str, folder: Path) -> tuple[Path, str]:
    Mtp(name).save(folder)
    return folder, MTP


def save_smaller_model(model_type: str, folder: Path) -> tuple[Path, str]:
    """It may have fewer or more rows of padding than the served model."""
    vocab_size = {"llama": 128, "qwen3": 100, "gemma3_text": 140}[model_type]
    smaller = save_draft_model(folder / "smaller", model_type, vocab_size)
    return Path(save_small_model(folder / "model")), config_of(smaller)


SAVERS: dict[str, Saver] = {
    **{name: partial(save_mtp_behind_the_layers, name) for name in MODELS},
    **{name: partial(save_mtp_apart, name) for name in NAMES},
    **{f"{name} as draft model": partial(save_smaller_model, name) for name in DRAFT_MODELS},
}
SELDOM = set(NAMES) - set(ALWAYS)
HEADS = [pytest.param(name, marks=pytest.mark.long if name in SELDOM else ()) for name in SAVERS]


@pytest.fixture(scope="module", params=HEADS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, config = SAVERS[request.param](tmp_path_factory.mktemp("head"))
    return Pair(make(folder, config), make(folder, None))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED | {"temperature": 1.0}], ids=["greedy", "seeded"])
def test_the_text_is_that_without_drafts(pair: Pair, sampling: dict[str, Any]) -> None:
    prompts = prompts_of(4)
    params = [params_of(sampling, LIKELY if index % 2 else {"logprobs": 2}, LONG) for index in range(4)]

    drafted = pair.drafting.generate(prompts, params)

    assert_same(drafted, pair.plain.generate(prompts, params))
    assert sum(generation.drafts is not None for generation in drafted) == 4


def test_drafts_are_accepted(pair: Pair) -> None:
    params = params_of(SEEDED, {"temperature": 30.0, "max_new_tokens": 25})  # the noise decides, which is the same
    prompts = prompts_of(4)

    drafted = pair.drafting.generate(prompts, params)

    assert_same(drafted, pair.plain.generate(prompts, params))
    assert num_accepted(drafted) > 20
