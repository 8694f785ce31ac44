"""Steps with drafts in a real worker: the text is the one without drafts, and lengths are those of the router."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.messages.int_arrays import Int64Array, int32s, int64s
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step, StepResult
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.pool import KvPool
from lightserve.router.scheduler import GroupScheduler, Scheduler
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.sampled import Sampled, TokenOnlyRows
from lightserve.worker.collector import PendingStep, StepCollector
from lightserve.worker.rpc import GetResult
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.draft_input import VerifiedCounts
from lightserve.worker.worker import ModelWorker
from test.worker.kv.test_windowed_pool import make as make_windowed, save_model

NUM_DRAFTS = 3
VOCAB = 128
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.2},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"typical_p": 0.8, "logit_bias": {5: 3.0, 7: -100.0}},
    {"temperature": 0, "allowed_token_ids": tuple(range(3, 40)), "bad_words_ids": ((9,),)},
]
TOKEN_BY_TOKEN: list[dict[str, Any]] = [
    {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0, "bad_words_ids": ((5, 9), (7, 8))},
    {"watermark": True, "min_new_tokens": 9},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "temperature": 0},
]


class Oracle:
    """Knows the texts, by their seeds. Some of its drafts are wrong, and some are missing."""

    def __init__(self, texts: dict[int, list[int]], wrong: float = 0.25) -> None:
        self._texts = texts
        self._wrong = wrong
        self._rng = random.Random(0)

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        drafts: list[int] = []
        for req, count, ready in zip(reqs, counts.tolist(), ready_len.tolist(), strict=True):
            after = self._texts[req.seed][ready + 1 : ready + 1 + count]
            drafts += [self._changed(token) for token in after] + [0] * (count - len(after))
        return torch.tensor(drafts, dtype=torch.int64)

    def _changed(self, token: int) -> int:
        if self._rng.random() >= self._wrong:
            return token
        return self._rng.choice((NO_DRAFT, (token + 1) % VOCAB))


class Drafting:
    """An LLM whose worker drafts. It compares the lengths of router and worker after every launch."""

    def __init__(self, llm: LLM, proposer: Oracle | None) -> None:
        self.llm = llm
        worker = llm.worker
        assert isinstance(worker, ModelWorker)
        self.worker = worker
        if proposer is not None:
            worker._drafts.proposer = proposer
        tokens = worker.max_total_token_num
        pool = KvPool(tokens, make_group_pools(worker.kv_groups, tokens))
        limits = replace(llm._scheduler.limits, num_drafts=NUM_DRAFTS, weight_read_tokens=0.0)
        llm._scheduler = Scheduler(GroupScheduler(pool, limits))
        self.counts: Counter[int] = Counter()  # by the tokens that a request got in one step
        self.may_wait = False  # the worker may know tokens before the router does
        self.num_counted = 0  # requests whose length only the device knew
        self._launch = worker.launch
        worker.launch = self.launch  # type: ignore[method-assign]

    def launch(self, step: Step) -> GetResult:
        columns, rows = self.worker._batch.columns, self.worker._batch._row_of
        get_result = self._launch(step)
        for req in self.llm._scheduler.only_group.batch:
            row = rows[req.req_id]
            cache_len, spare_slots = columns.cache_len.item(row), columns.spare_slots.item(row)
            in_flight = columns.drafts_in_flight.item(row)
            assert spare_slots >= in_flight >= 0
            assert cache_len + spare_slots == req.planned_len + req.spare_slots == len(req.slots)
            if not self.may_wait:
                assert (cache_len, in_flight) == (req.planned_len, req.planned_drafts)
            # a rule may have waited for tokens that the router has not seen yet
            assert 0 <= cache_len - req.planned_len <= req.planned_drafts - in_flight
        self.num_counted += int((columns.drafts_in_flight[list(rows.values())] > 0).sum()) if rows else 0
        return lambda: self._count(get_result())

    def _count(self, result: StepResult) -> StepResult:
        self.counts.update(result.plain.each_counts.tolist())
        return result


def params_of(options: list[dict[str, Any]]) -> list[GenerationParams]:
    """Three of each, with other lengths."""
    wanted: list[GenerationParams] = []
    for more in options * 3:
        fields = {"max_new_tokens": 10 + 7 * len(wanted) % 40, "ignore_eos": True, "seed": len(wanted), **more}
        wanted.append(GenerationParams.of(**fields))
    return wanted


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


def texts_of(generations: list[Generation]) -> dict[int, list[int]]:
    """By seed, which is the number of the request."""
    return {seed: [*one.prompt_ids, *one.token_ids] for seed, one in enumerate(generations)}


def make(folder: str, tokens: int = 4000) -> LLM:
    return LLM(folder, device="cpu", data_type="float32", max_total_token_num=tokens, batch_max_tokens=200)


def run_both(
    plain: LLM, drafting: LLM, wanted: list[GenerationParams], wrong: float = 0.25
) -> tuple[list[Generation], Drafting]:
    """Assert that both give the same text. Returns it, and the one that drafted."""
    prompts = prompts_of(len(wanted))
    expected = plain.generate(prompts, wanted)
    watched = Drafting(drafting, Oracle(texts_of(expected), wrong))
    watched.may_wait = any(one.sampling.depends_on_output for one in wanted)

    generations = drafting.generate(prompts, wanted)

    assert [one.error for one in generations] == [None] * len(wanted)
    assert texts_of(generations) == texts_of(expected)
    for drafted, wanted_text in zip(generations, expected, strict=True):
        assert drafted.logprobs == pytest.approx(wanted_text.logprobs, abs=1e-4)
        assert (drafted.prompt_logprobs is None) == (wanted_text.prompt_logprobs is None)
    assert drafting._scheduler.only_group.pool.used == 0
    return expected, watched


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_text_is_the_same_as_without_drafts(folder: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(folder)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    _, watched = run_both(plain, make(folder), params_of(PLAIN))

    assert all(watched.counts[count] for count in range(1, NUM_DRAFTS + 2))
    assert watched.num_counted


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_may_not_draft_share_steps_with_others(
    folder: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(folder)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    expected, watched = run_both(plain, make(folder), params_of(PLAIN[:3] + TOKEN_BY_TOKEN))

    assert any(one.logprobs for one in expected)
    assert any(one.prompt_logprobs for one in expected)
    assert all(watched.counts[count] for count in range(1, NUM_DRAFTS + 2))


def test_right_drafts_are_all_accepted(folder: str) -> None:
    expected, watched = run_both(make(folder), make(folder), params_of(PLAIN), wrong=0.0)

    tokens = sum(len(one.token_ids) for one in expected)
    assert watched.counts[NUM_DRAFTS + 1] * (NUM_DRAFTS + 1) > 0.7 * tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_nothing(folder: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, wanted = prompts_of(len(PLAIN) * 3), params_of(PLAIN)
    expected = make(folder).generate(prompts, wanted)
    small = make(folder, tokens=150)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    watched = Drafting(small, None)
    small.generate([[1, 2]] * 40, GenerationParams.of(max_new_tokens=2))  # the scheduler now expects short outputs
    watched.worker._drafts.proposer = Oracle(texts_of(expected))

    generations = small.generate(prompts, wanted)

    assert small._scheduler.num_preemptions > 0
    assert texts_of(generations) == texts_of(expected)


def test_a_worker_without_a_proposer_takes_steps_with_drafts(folder: str) -> None:
    prompts, wanted = prompts_of(15), params_of(PLAIN)
    expected = make(folder).generate(prompts, wanted)
    watched = Drafting(make(folder), None)

    generations = watched.llm.generate(prompts, wanted)

    assert texts_of(generations) == texts_of(expected)
    assert set(watched.counts) == {1}


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_have_slots_of_the_windowed_pool_too(
    tmp_path_factory: pytest.TempPathFactory, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = save_model("gemma3_text", tmp_path_factory.mktemp("gemma"))
    plain = make_windowed(model_dir, windowed=0)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    _, watched = run_both(plain, make_windowed(model_dir, windowed=2000), params_of(PLAIN[:3]))

    assert all(watched.counts[count] for count in range(1, NUM_DRAFTS + 2))


def test_a_request_without_a_token_after_its_drafts_fails_behind_them() -> None:
    plain = TokenOnlyRows(int64s([0, 2]), int64s([4, 5]), int64s([1, 2]), int64s([40, 50]), drafts=int64s([1, 2]))
    tokens = torch.tensor([7, ops.NO_TOKEN, 8, 9, ops.NO_TOKEN])
    verified = VerifiedCounts(torch.tensor([2, 0, 2, 0, 0]), torch.tensor([1, 0, 2, 0, 0]))
    collector = StepCollector()

    result = collector.add(PendingStep(tokens, Sampled([], plain), None, verified))()
    (update,) = collector.take_updates()

    assert [failure.req_id for failure in result.failed] == [40]
    assert [(out.req_id, out.token.id) for out in result.tokens] == [(40, 7), (50, 8), (50, 9)]
    assert int32s(result.plain.counts).tolist() == [1, 2]
    assert list(result.drafts.rows()) == [(40, 1, 1), (50, 2, 1)]
    assert (update.plain_token_ids.tolist(), update.plain_counts.tolist()) == ([7, 0, 8, 9], [2, 2])
