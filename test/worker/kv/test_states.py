"""A model with recurrent layers gives the text of transformers, however the router moves its states.

Rows that the router has freed are filled with NaN, so that reading one of them shows in the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.profile import H200
from lightserve.errors import ServerError
from lightserve.messages.control import StateKv
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.router.kv.state_pool import StatePool
from lightserve.text.beam_search import BeamParams
from lightserve.worker.kv.size import kv_size
from lightserve.worker.rpc import GetResult
from test.hybrid_model import greedy, prompt, save_hybrid_model
from test.text.test_beam_search import assert_same, transformers_beams
from test.worker.kv.test_size import Memory

COUNT = 12  # tokens
PARAMS = GenerationParams.of(max_new_tokens=COUNT, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return save_hybrid_model(tmp_path_factory.mktemp("hybrid"))


def make(hybrid: tuple[str, Any], rows: int = 40, tokens: int = 4000, **options: Any) -> LLM:
    options = {"running_max_req_size": 4, "batch_max_tokens": 100} | options
    llm = LLM(hybrid[0], device="cpu", data_type="float32", max_total_token_num=tokens, max_state_rows=rows, **options)
    FreedRowsHoldNan(llm)
    return llm


@pytest.mark.parametrize(("given", "expected"), [(None, 256), (5, 5)])
def test_recurrent_models_run_fewer_requests_at_once_than_the_device_could(
    hybrid: tuple[str, Any], given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "profile", lambda *_: H200)

    llm = make(hybrid, running_max_req_size=given)

    assert llm.worker.model.req_manager.max_reqs == expected
    assert llm._scheduler.limits.max_running == expected


def states_of(llm: LLM) -> StatePool:
    (pool,) = llm._scheduler.only_group.pool.groups
    assert isinstance(pool, StatePool)
    return pool


class FreedRowsHoldNan:
    """A step may read rows that are freed when it is planned. So these are filled before the next step."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._launch = llm.worker.launch
        self._free = torch.arange(llm.worker.model.mem_manager.state_rows)
        llm.worker.launch = self.launch  # type: ignore[method-assign]

    def launch(self, step: Step) -> GetResult:
        for buffers in self._llm.worker.model.mem_manager.state_buffers:
            for buffer in buffers:
                buffer[:, self._free] = float("nan")
        self._free = torch.from_numpy(~states_of(self._llm).slots._slots._is_used).nonzero().flatten()
        return self._launch(step)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    generations = llm.generate(prompts, PARAMS)
    assert all(one.error is None for one in generations)
    return [one.token_ids for one in generations]


def assert_idle(llm: LLM) -> None:
    pool = llm._scheduler.only_group.pool
    assert pool.used == 0
    assert [group.used for group in pool.groups] == [0]


@pytest.mark.parametrize("rows", [40, 5, 2])
def test_text_is_that_of_transformers_with_many_rows_and_with_few(hybrid: tuple[str, Any], rows: int) -> None:
    """Prompts in chunks, requests side by side, and turns of a chat that continue cached prefixes."""
    llm = make(hybrid, rows)
    prompts = [prompt(n, seed=n) for n in (230, 120, 40, 1)]

    found = tokens_of(llm, prompts)
    turns = [[*ids, *answer, *prompt(9, seed=7)] for ids, answer in zip(prompts, found, strict=True)]
    cut = [ids[: len(ids) // 2] + prompt(5, seed=8) for ids in prompts]

    for requests, texts in ((prompts, found), (turns, tokens_of(llm, turns)), (cut, tokens_of(llm, cut))):
        assert texts == [greedy(hybrid[1], ids, COUNT) for ids in requests]
    assert tokens_of(llm, turns) == [greedy(hybrid[1], ids, COUNT) for ids in turns]
    assert_idle(llm)


def test_text_is_the_same_after_preemptions(hybrid: tuple[str, Any]) -> None:
    llm = make(hybrid, 8)
    prompts = [prompt(150, seed=n) for n in range(3)]
    params = GenerationParams.of(max_new_tokens=40, temperature=0, ignore_eos=True)

    found: list[list[int]] = [[], [], []]
    for count, out in enumerate(llm.stream(prompts, params)):
        found[out.index].append(out.token_id or 0)
        if count % 10 == 9 and llm._scheduler.num_running > 1:
            llm._scheduler.only_group.preemption.preempt_newest()

    assert found == [greedy(hybrid[1], ids, 40) for ids in prompts]
    assert llm._scheduler.num_preemptions > 3
    assert_idle(llm)


def test_a_pool_that_is_too_small_for_all_requests_preempts_some(hybrid: tuple[str, Any]) -> None:
    """Short outputs before make the estimate of lengths too low."""
    llm = make(hybrid, 8, tokens=330)
    llm.generate([prompt(5, seed=n) for n in range(60)], max_new_tokens=2, temperature=0, ignore_eos=True)
    prompts = [prompt(60, seed=n) for n in range(4)]
    params = GenerationParams.of(max_new_tokens=60, temperature=0, ignore_eos=True)

    found = [one.token_ids for one in llm.generate(prompts, params)]

    assert found == [greedy(hybrid[1], ids, 60) for ids in prompts]
    assert llm._scheduler.num_preemptions > 0
    assert_idle(llm)


def test_choices_with_seeds_are_those_of_requests_on_their_own(hybrid: tuple[str, Any]) -> None:
    together, alone = make(hybrid), make(hybrid)
    params = [GenerationParams.of(max_new_tokens=30, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]

    found = [one.token_ids for one in together.generate([prompt(180)] * 4, params)]

    expected = [alone.generate([prompt(180, seed=n), prompt(180)], params[n])[1].token_ids for n in range(4)]
    assert found == expected
    assert len({tuple(ids) for ids in found}) > 1


@pytest.mark.parametrize("rows", [40, 8])
def test_beams_are_those_of_transformers(hybrid: tuple[str, Any], rows: int) -> None:
    params = BeamParams(num_beams=3, n=3, max_new_tokens=8)

    (beams,) = make(hybrid, rows).beam_search([prompt(70)], params)

    assert_same(beams, transformers_beams(hybrid[1], prompt(70), params, []))


def test_logprobs_of_a_prompt_compute_all_of_it(hybrid: tuple[str, Any]) -> None:
    llm = make(hybrid)
    tokens_of(llm, [prompt(150)])

    (one,) = llm.generate([prompt(150)], max_new_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=0)

    assert one.prompt_logprobs is not None
    with torch.inference_mode():
        logprobs = hybrid[1](torch.tensor([prompt(150)])).logits[0].log_softmax(-1)
    expected = [logprobs[i, token].item() for i, token in enumerate(prompt(150)[1:])]
    assert [token.logprob for token in one.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-3)


def test_requests_that_the_worker_puts_next_to_each_other_keep_their_rows(hybrid: tuple[str, Any]) -> None:
    """Requests that share a long prefix are neighbours in a decode step, in another order than in the command."""
    llm = make(hybrid, 60, 9000, running_max_req_size=20, batch_max_tokens=500)
    prompts = [prompt(280, seed=n % 2) + prompt(3, seed=n) for n in range(18)]

    found = tokens_of(llm, prompts)

    assert found == [greedy(hybrid[1], ids, COUNT) for ids in prompts]


def test_logprobs_of_a_deterministic_server_have_the_same_bits_in_any_step(hybrid: tuple[str, Any]) -> None:
    """Alone, among others in small chunks, from a warm cache, and after preemptions that lose the states."""
    shared = prompt(140, seed=1)
    prompts = [shared + prompt(n, seed=n) for n in (7, 33, 53)] + [prompt(65, seed=2), prompt(3, seed=3)]
    params = GenerationParams.of(max_new_tokens=15, temperature=0, ignore_eos=True, logprobs=2)

    def logprobs(llm: LLM) -> list[list[float]]:
        return [one.logprobs for one in llm.generate(prompts, params)]

    alone = [
        make(hybrid, deterministic=True, batch_max_tokens=500).generate([ids], params)[0].logprobs for ids in prompts
    ]
    together = make(hybrid, deterministic=True, running_max_req_size=8, batch_max_tokens=70)
    cold, warm = logprobs(together), logprobs(together)
    assert cold == alone
    assert warm == alone
    assert states_of(together).num_kept > 0

    few_rows = make(hybrid, 3, deterministic=True)
    found: list[list[float]] = [[] for _ in prompts]
    for count, out in enumerate(few_rows.stream(prompts, params)):
        found[out.index].append(out.logprob or 0.0)
        if count % 6 == 5 and few_rows._scheduler.num_running > 1:
            few_rows._scheduler.only_group.preemption.preempt_newest()
    assert found == alone
    assert few_rows._scheduler.num_preemptions > 3


def test_states_in_bfloat16_take_half_the_memory_and_hardly_change_logprobs(hybrid: tuple[str, Any]) -> None:
    params = GenerationParams.of(max_new_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=1)
    prompts = [prompt(230, seed=1), prompt(40, seed=2)]
    exact, rounded = make(hybrid), make(hybrid, state_dtype="bfloat16")

    logprobs = [[one.logprobs for one in llm.generate(prompts, params)] for llm in (exact, rounded)]
    warm = [one.logprobs for one in rounded.generate(prompts, params)]

    layouts = [llm.worker.model.kv_layout for llm in (exact, rounded)]
    sums = [
        sum(tensor.num_bytes for group in one.states for tensor in group.tensors if tensor.is_sum) for one in layouts
    ]
    assert sums[0] == 2 * sums[1] > 0
    assert "states in bfloat16" in rounded.worker.dtype_and_device
    assert logprobs[0] != logprobs[1]
    for expected, *found in zip(logprobs[0], logprobs[1], warm, strict=True):
        assert found == [pytest.approx(expected, abs=0.05)] * 2
    assert_idle(rounded)


def test_the_worker_says_how_many_rows_it_has(hybrid: tuple[str, Any]) -> None:
    assert make(hybrid, 40).worker.kv_groups == (StateKv(40),)


def test_memory_is_divided_between_kv_and_states(hybrid: tuple[str, Any]) -> None:
    llm = make(hybrid, max_req_total_len=10)
    model = llm.worker.model
    token_bytes, row_bytes = model.kv_layout.bytes_per_token, model.kv_layout.bytes_per_state_row
    config = replace(llm.config, max_total_token_num=None, max_state_rows=None)

    def sizes(budget: int, rows: int | None = None) -> tuple[int, int]:
        memory: Any = Memory(budget)
        found = kv_size(replace(config, max_state_rows=rows), model, memory, lambda: None)
        return found.tokens, found.state_rows

    large = 1000 * row_bytes
    tokens = large // token_bytes
    assert sizes(large) == ((large - sizes(large)[1] * row_bytes) // token_bytes, max(tokens // 256, 2 * 4))
    assert sizes(10 * row_bytes) == (5 * row_bytes // token_bytes, 5)  # half of the memory
    assert sizes(10 * row_bytes, rows=9) == (row_bytes // token_bytes, 9)
    with pytest.raises(ServerError, match="holds 1 recurrent states;"):
        sizes(3 * row_bytes)
