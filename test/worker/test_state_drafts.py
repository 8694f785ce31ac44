"""Models with recurrent layers compute drafts, and states see only those that are accepted: no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from lightserve.worker.worker import ModelWorker
from test.hybrid_model import save_hybrid_model
from test.models.architectures.cases import CASES
from test.worker.kv.test_states import FreedRowsHoldNan, assert_idle
from test.worker.test_draft_graphs import RerunGraphs, graphs as graphs
from test.worker.test_drafts import PLAIN, TOKEN_BY_TOKEN, Oracle, texts_of
from test.worker.test_ngram import (
    CONFIG,
    GREEDY,
    SEEDED,
    assert_same,
    num_accepted,
    params_of,
    prompts_of,
    without_costs,
)

KINDS = ["lfm2", "granitemoehybrid", pytest.param("falcon_h1", marks=pytest.mark.long)]  # of mixers
OPTIONS = [*PLAIN, *TOKEN_BY_TOKEN, {"temperature": 0, "logprobs": 2}]


def make(folder: str, config: str | None = CONFIG, **options: Any) -> LLM:
    options = {"max_total_token_num": 4000, "running_max_req_size": 8, "max_state_rows": 40} | options
    llm = LLM(folder, device="cpu", data_type="float32", speculative_config=config, **options)
    if config is not None:
        without_costs(llm)
    FreedRowsHoldNan(llm)
    return llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_hybrid_model(tmp_path_factory.mktemp("hybrid"))[0]


@pytest.fixture(scope="module")
def plain(folder: str) -> LLM:
    return make(folder, None)


def wanted_params(count: int) -> list[GenerationParams]:
    return [
        GenerationParams.of(
            **{"max_new_tokens": 10 + 5 * i % 30, "ignore_eos": True, "seed": i, **OPTIONS[i % len(OPTIONS)]}
        )
        for i in range(count)
    ]


def with_oracle(llm: LLM, texts: dict[int, list[int]]) -> LLM:
    """Its drafts are right three times of four."""
    assert isinstance(llm.worker, ModelWorker)
    llm.worker._drafts.proposer = Oracle(texts)
    llm.worker._drafts.leaves_out = False
    return llm


@pytest.mark.parametrize("depth", [1, 2])
def test_states_see_the_accepted_drafts_alone(
    folder: str, plain: LLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = prompts_of(14, seed=2), wanted_params(14)
    expected = plain.generate(prompts, params)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    llm = with_oracle(make(folder), texts_of(expected))

    drafted = llm.generate(prompts, params)

    assert_same(drafted, expected)
    assert num_accepted(drafted) > 50
    assert sum(one.drafts.rejected for one in drafted if one.drafts) > 20
    assert_idle(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mixer_takes_drafts_back(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.model_type, **case.fields)).float().eval()
    for weight in model.parameters():
        weight.data.normal_(std=0.15)
    model.save_pretrained(tmp_path)
    prompts = [[token % 90 for token in prompt] for prompt in prompts_of(6, seed=1)]
    params = [params_of(SEEDED | {"seed": i}, {"logprobs": 1} if i % 2 else {}, {"ignore_eos": True}) for i in range(6)]
    expected = make(str(tmp_path), None).generate(prompts, params)

    drafted = with_oracle(make(str(tmp_path)), texts_of(expected)).generate(prompts, params)

    assert_same(drafted, expected)
    assert num_accepted(drafted) > 40


def test_n_grams_and_cached_prefixes_give_the_same_text(folder: str, plain: LLM) -> None:
    llm = make(folder)
    prompts = [[*range(3, 60)] * 2, [5, 9, 7] * 20, [8] * 40]
    params = params_of(GREEDY, {"ignore_eos": True, "max_new_tokens": 30})

    for _ in range(2):
        expected = plain.generate(prompts, params)
        drafted = llm.generate(prompts, params)
        assert_same(drafted, expected)
        prompts = [[*prompt, *one.token_ids, 4, 5] for prompt, one in zip(prompts, expected, strict=True)]

    assert num_accepted(drafted)
    assert_idle(llm)


@pytest.mark.long
def test_preempted_requests_go_on_with_drafts(folder: str, plain: LLM) -> None:
    prompts, params = prompts_of(6, seed=3), params_of(GREEDY, {"ignore_eos": True, "max_new_tokens": 50})
    expected = plain.generate(prompts, params)
    llm = make(folder, max_total_token_num=200)
    llm.generate([[1, 2]] * 30, GenerationParams.of(max_new_tokens=2))  # the scheduler now expects short outputs

    drafted = llm.generate(prompts, params)

    assert llm._scheduler.num_preemptions > 0
    assert_same(drafted, expected)
    assert num_accepted(drafted)


@pytest.mark.parametrize("depth", [1, 2])
def test_captured_steps_change_states_once(
    folder: str, plain: LLM, graphs: list[RerunGraphs], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if tokens are sampled again after the graph."""
    prompts = prompts_of(8, seed=5)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    llm = make(folder)
    assert isinstance(llm.worker, ModelWorker)
    llm.worker.capture()
    by_temperature = [params_of({"seed": i, "temperature": i % 2, "ignore_eos": True}) for i in range(8)]

    for params in (by_temperature, wanted_params(8)):
        expected = plain.generate(prompts, params)
        drafted = with_oracle(llm, texts_of(expected)).generate(prompts, params)

        assert_same(drafted, expected)
        assert num_accepted(drafted)
    assert any(count for shape, count in graphs[-1].replays.items() if shape.num_drafts)
